"""One choice from the engine's outputs to what is shown of it, the same whether streamed or not.

A streamed answer is the sequence of `Part`s; a plain one is the same parts joined. So the two agree
by construction, array for array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.engine import Engine, Output, Prompt, Sampling
from server.errors import EngineFailed, InvalidRequest
from server.logprobs import Entry, Offsets, echo_entries


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to be run: `index` is prompt_index · n + choice."""

    index: int
    prompt_index: int
    prompt: Prompt
    sampling: Sampling


@dataclass(slots=True)
class Part:
    """What is new in a choice: text, tokens shown with logprobs, raw token ids, and how it
    ended.
    """

    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first: bool = False


class Answer:
    """Accumulates one choice. `step(output)` gives the next part, or None when nothing is new.

    A token's logprobs are shown with the text that begins at it, not earlier: a stop text that was
    cut off takes its tokens' logprobs along. Tokens without text at the end (end of sequence) are
    shown with the last part.
    """

    def __init__(self, job: Job, engine: Engine, *, echo: bool, logprobs: bool) -> None:
        self.job = job
        self.num_tokens = 0
        self.receipt: Mapping[str, Any] | None = None
        self.prompt_logprobs: Any = None
        self.done = False
        self._engine, self._logprobs = engine, logprobs
        self._echo = (job.prompt.text or "") if echo else None
        self._special = engine.info.special_token_ids
        self._hide = self._special if job.sampling.skip_special_tokens else frozenset()
        self._offsets = Offsets(len(self._echo or ""))
        self._shown = 0
        self._held: list[Entry] = []
        self._first = True

    def step(self, output: Output) -> Part | None:
        """Take in one output. Raises `EngineFailed` when the engine gave the choice up."""
        part = Part(output.text, first=self._first)
        if self._first:
            self._begin(output, part)
        self.num_tokens += len(output.token_ids)
        part.token_ids = list(output.token_ids)
        self._shown += len(part.text)
        if self._logprobs and output.logprobs:
            self._hold(output)
        if output.finish_reason is not None:
            self._end(output, part)
        elif self._held and part.text:
            self._release(part)
        if part.text or part.token_ids or part.entries or part.finish_reason or part.first:
            return part
        return None

    def _begin(self, output: Output, part: Part) -> None:
        self._first = False
        self.prompt_logprobs = output.prompt_logprobs
        if self._echo is None:
            return
        part.text = self._echo + part.text
        if self._logprobs:
            ids = self.job.prompt.token_ids
            positions = output.prompt_logprobs
            if positions is None or len(positions) != len(ids):
                raise EngineFailed("the engine returned no logprobs for the prompt")
            token_text = self._engine.token_text
            part.entries = echo_entries(self._echo, ids, positions, token_text, self._special)

    def _hold(self, output: Output) -> None:
        for position in output.logprobs or ():
            token = position.token
            hidden = token.token_id in self._hide
            start = self._offsets.at if hidden else self._offsets.advance(token.text)
            self._held.append(Entry(start, token.token_id, token.text, position))

    def _release(self, part: Part) -> None:
        count = 0
        while count < len(self._held) and self._held[count].start < self._shown:
            count += 1
        part.entries += self._held[:count]
        del self._held[:count]

    def _end(self, output: Output, part: Part) -> None:
        if output.finish_reason == "error" and self.job.sampling.structured:
            raise InvalidRequest(
                "structured_outputs: the grammar, with the other options of this request, leaves "
                "no token to go on with",
                param="structured_outputs",
            )
        if output.finish_reason not in ("stop", "length"):
            raise EngineFailed(f"the engine ended the request: {output.finish_reason}")
        self.done = True
        self.receipt = output.receipt
        part.finish_reason, part.stop_reason = output.finish_reason, output.stop_reason
        cut = isinstance(output.stop_reason, str)
        if cut and not self.job.sampling.include_stop_str_in_output:
            self._release(part)
            self._held.clear()
        part.entries += self._held
        self._held = []


def join(parts: Iterable[Part]) -> Part:
    """The whole of a choice."""
    whole = Part(first=True)
    texts = []
    for part in parts:
        texts.append(part.text)
        whole.entries += part.entries
        whole.token_ids += part.token_ids
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
    whole.text = "".join(texts)
    return whole
