"""Logprobs in OpenAI's shapes.

One definition everywhere: raw, that is log-softmax of the model's logits before temperature,
penalties and filters. A token of probability zero has -9999.0, since JSON has no -Infinity.

A token is spelled by its text, or as `bytes:\\xNN…` when it is no whole UTF-8. In a map of
`top_logprobs` the chosen token always stands under the spelling in `tokens`; among the others, the
most likely one keeps a spelling that several share, and the rest are keyed `token_id:N`.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.engine import Position, TokenLogprob
from server.errors import EngineFailed

FLOOR = -9999.0
_BYTES = "bytes:"


@dataclass(frozen=True, slots=True)
class Entry:
    """A token in its place: where it starts in the text (characters), and its logprobs if any."""

    start: int
    token_id: int
    text: str
    position: Position | None


def finite(value: float) -> float:
    """`value`, at least FLOOR. Raises `EngineFailed` on NaN and +Infinity: no such logprob
    exists.
    """
    if value > FLOOR:
        if value == math.inf:
            raise EngineFailed("the engine returned an infinite logprob")
        return value
    if math.isnan(value):
        raise EngineFailed("the engine returned a logprob that is not a number")
    return FLOOR


def raw_bytes(spelling: str) -> bytes | None:
    """The bytes behind a `bytes:\\xNN…` spelling; None when it is an ordinary text."""
    if not spelling.startswith(_BYTES + "\\x"):
        return None
    parts = spelling[len(_BYTES) :].split("\\x")
    try:
        return bytes(int(part, 16) for part in parts[1:]) if not parts[0] else None
    except ValueError:
        return None


class Offsets:
    """Where tokens start in the text. Tokens that carry parts of a character advance by
    whole ones.
    """

    def __init__(self, start: int) -> None:
        self.at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False

    def advance(self, text: str) -> int:
        """The start of a token spelled `text`, and move on behind it."""
        start = self.at
        raw = raw_bytes(text)
        if raw is not None:
            self.at += len(self._decoder.decode(raw))
            self._partial = bool(self._decoder.getstate()[0])
            return start
        if self._partial:
            self.at += len(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._partial = False
            start = self.at
        self.at += len(text)
        return start


def echo_entries(
    text: str,
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    token_text: Callable[[int], str],
    special: frozenset[int],
) -> list[Entry]:
    """Entries for an echoed prompt. A special token counts only where it stands in `text`."""
    offsets = Offsets(0)
    entries = []
    for token_id, position in zip(token_ids, positions, strict=True):
        spelling = position.token.text if position else token_text(token_id)
        hidden = token_id in special and not text.startswith(spelling, offsets.at)
        start = offsets.at if hidden else offsets.advance(spelling)
        entries.append(Entry(start, token_id, spelling, position))
    return entries


def spell(token_id: int, text: str, as_ids: bool) -> str:
    """The token as clients see it; `token_id:N` when they asked for ids."""
    return f"token_id:{token_id}" if as_ids else text


def top_map(position: Position, k: int, as_ids: bool) -> dict[str, float]:
    """The chosen token and the k most likely ones, each exactly once, most likely first."""
    chosen = position.token
    kept = list(position.top[:k])
    if all(other.token_id != chosen.token_id for other in kept):
        kept.append(chosen)
    own = spell(chosen.token_id, chosen.text, as_ids)
    found: dict[str, float] = {}
    for other in kept:
        key = own
        if other.token_id != chosen.token_id:
            key = spell(other.token_id, other.text, as_ids)
            if key == own or key in found:
                key = f"token_id:{other.token_id}"
        found[key] = finite(other.logprob)
    return found


def completion_logprobs(entries: Iterable[Entry], k: int, as_ids: bool) -> dict[str, list[Any]]:
    """The four parallel arrays of a completion choice. The first token of all has null logprobs."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    starts: list[int] = []
    for entry in entries:
        position = entry.position
        tokens.append(spell(entry.token_id, entry.text, as_ids))
        values.append(finite(position.token.logprob) if position else None)
        tops.append(top_map(position, k, as_ids) if position else None)
        starts.append(entry.start)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": starts,
    }


def chat_logprobs(entries: Iterable[Entry], k: int, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` of a chat choice: a list, so tokens that print alike need no other name."""
    content = []
    for entry in entries:
        if entry.position is None:
            continue
        item = _chat_token(entry.position.token, as_ids)
        item["top_logprobs"] = [_chat_token(t, as_ids) for t in entry.position.top[:k]]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    raw = raw_bytes(token.text)
    if raw is None:
        raw = token.text.encode("utf-8", "surrogatepass")
    return {
        "token": spell(token.token_id, token.text, as_ids),
        "logprob": finite(token.logprob),
        "bytes": list(raw),
    }


def prompt_logprobs(positions: Sequence[Position | None], k: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token a map from token id; null for the first token."""
    shown: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            shown.append(None)
            continue
        found = {}
        for token in (position.token, *position.top[:k]):
            found[str(token.token_id)] = {
                "logprob": finite(token.logprob),
                "rank": token.rank,
                "decoded_token": token.text,
            }
        shown.append(found)
    return shown
