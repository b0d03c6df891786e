"""What a request's options do to its logits before the draw: one row at a time, from that
request's own options.

vLLM keeps these in tables indexed by batch row, and rows are recycled: in 0.23.0 a row that moves
down leaves its allowed-token mask behind for the next owner, and swapping two rows copies one
mask over the other. Here nothing is kept between steps; each step reads the options of the
request that owns the row now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class Edits:
    """One row's edits.

    Token ids outside the vocabulary are ignored. `answer` and `prompt` are what penalties see.
    """

    allowed: Sequence[int] | None = None  # every other token is out
    banned: Sequence[
        int
    ] = ()  # out: what would end a bad word, and the stop tokens before min_tokens
    bias: Sequence[tuple[int, float]] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    _penalised: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        on = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        object.__setattr__(self, "_penalised", on)

    @property
    def empty(self) -> bool:
        return self.allowed is None and not (self.banned or self.bias or self._penalised)

    @property
    def only_bans(self) -> bool:
        return self.allowed is None and not (self.bias or self._penalised)


def bad_word_ends(bad_words: Sequence[Sequence[int]], answer: Sequence[int]) -> list[int]:
    """The tokens that would complete a bad word now: its last token, when the answer ends with
    all before it.
    """
    ends = []
    for word in bad_words:
        head = list(word[:-1])
        if not head or list(answer[-len(head) :]) == head:
            ends.append(word[-1])
    return ends


def apply(logits: torch.Tensor, edits: Sequence[Edits]) -> torch.Tensor:
    """float32 [N, V] in place, one `Edits` a row; returns it. Rows with empty edits are not
    touched.

    Order: allowed, banned, bias, then penalties (repetition, frequency, presence), each one
    float32 operation per token. Repetition sees prompt and answer, dividing positive logits and
    multiplying the others; frequency and presence see the answer.
    """
    _ban(logits, [(row, e.banned) for row, e in enumerate(edits) if e.banned and e.only_bans])
    for row, edit in enumerate(edits):
        if edit.only_bans:
            continue
        line = logits[row]
        if edit.allowed is not None:
            ids = _tokens(edit.allowed, line)
            held = line[ids]
            line.fill_(-torch.inf)
            line[ids] = held
        if edit.banned:
            line[_tokens(edit.banned, line)] = -torch.inf
        if edit.bias:
            pairs = {t: b for t, b in edit.bias if 0 <= t < line.shape[0]}
            bias = torch.tensor(list(pairs.values()), dtype=torch.float32, device=line.device)
            line[torch.tensor(list(pairs), dtype=torch.int64, device=line.device)] += bias
        if edit._penalised:
            _penalise(line, edit)
    return logits


def _ban(logits: torch.Tensor, banned: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Minus infinity at (row, id) for all rows at once: one copy to the device, which waits for
    nothing. Rows that have only bans are the common ones, as min_tokens makes them.
    """
    width = logits.shape[1]
    pairs = [(row, token) for row, ids in banned for token in ids if 0 <= token < width]
    if not pairs:
        return
    at = torch.tensor(pairs, dtype=torch.int64, pin_memory=logits.device.type == "cuda")
    at = at.to(logits.device, non_blocking=True)
    logits[at[:, 0], at[:, 1]] = -torch.inf


def _tokens(ids: Sequence[int], line: torch.Tensor) -> torch.Tensor:
    a = np.unique(np.asarray(ids, dtype=np.int64))
    return torch.from_numpy(a[(a >= 0) & (a < line.shape[0])]).to(line.device)


def _penalise(line: torch.Tensor, edit: Edits) -> None:
    said = np.asarray(edit.answer, dtype=np.int64)
    seen = np.concatenate([np.asarray(edit.prompt, dtype=np.int64), said])
    tokens = np.unique(seen) if edit.repetition != 1.0 else np.unique(said)
    tokens = tokens[(tokens >= 0) & (tokens < line.shape[0])]
    if not tokens.size:
        return
    at = torch.from_numpy(tokens).to(line.device)
    x = line[at]
    if edit.repetition != 1.0:
        factor = torch.full_like(x, edit.repetition)  # a tensor: CUDA divides by a number inexactly
        x = torch.where(x > 0, x / factor, x * factor)
    ids, times = np.unique(said, return_counts=True)
    count = np.zeros(tokens.size, dtype=np.float32)
    inside = np.isin(ids, tokens)
    count[np.searchsorted(tokens, ids[inside])] = times[inside]
    n = torch.from_numpy(count).to(line.device)
    if edit.frequency != 0.0:
        x = x - n * edit.frequency
    if edit.presence != 0.0:
        x = x - (n > 0).to(torch.float32) * edit.presence
    line[at] = x
