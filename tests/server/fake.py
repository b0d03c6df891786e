"""An engine without a model: the same protocol, words for tokens, answers that are a function of
the request.

The vocabulary: 0 <eos>, 1..256 single bytes, 257.. the words below (with their leading space). Text
is tokenized greedily. An answer token is a hash of (seed, choice, position, prompt), so that
answers repeat, and differ between seeds and choices; a prompt that holds `say:` is answered by what
follows.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.engine import (
    Health,
    ModelInfo,
    Output,
    Position,
    Prompt,
    Sampling,
    TokenLogprob,
    ToolCall,
)
from server.errors import EngineDead, InvalidRequest

WORDS = (
    " the", " of", " AI", " is", " and", " a", " future", " in", " to", " bits", " same", " seed",
    " token", " red", " blue", "Hello", " world", ".", ",", " one", " two", " three", " same",
)  # fmt: skip
EOS = 0
FIRST_WORD = 257
VOCAB = FIRST_WORD + len(WORDS)


@dataclass
class FakeEngine:
    """Knobs of faults: `delay_s` per token, `fail_after` tokens, `nan`, `dead`, `stuck`."""

    delay_s: float = 0.0
    add_delay_s: float = 0.0
    fail_after: int | None = None
    fault: Exception | None = None
    logprob: float | None = None  # every logprob is this
    dead: bool = False
    stuck: bool = False
    hold: int = 1  # tokens per output
    max_model_len: int = 512
    tool_parser: str | None = None
    running: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)
    peak: int = 0
    closed: bool = False

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="fake",
            aliases=("org/fake-7b",),
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            created=1_700_000_000,
            eos_token_ids=(EOS,),
            special_token_ids=frozenset({EOS}),
            max_token_chars=max(map(len, WORDS)),
            tool_parser=self.tool_parser,
        )

    @property
    def fingerprint(self) -> str:
        return "sb_fake"

    @property
    def fingerprint_tree(self) -> Mapping[str, Any]:
        return {"model": {"weights": "none"}}

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            found = [i for i, w in enumerate(WORDS) if text.startswith(w, at)]
            if found:
                best = max(found, key=lambda i: (len(WORDS[i]), -i))
                ids.append(FIRST_WORD + best)
                at += len(WORDS[best])
            else:
                ids += [1 + b for b in text[at].encode()]
                at += 1
        return tuple(ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        keep = [t for t in token_ids if not (skip_special_tokens and t == EOS)]
        return b"".join(_raw(t) for t in keep).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        raw = _raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        if any(m["role"] == "refuse" for m in messages):
            raise InvalidRequest("the chat template refuses this", param="messages")
        text = "".join(f"[{m['role']}]{m.get('content') or ''}" for m in messages)
        if tools:
            text += f"[tools]{len(tools)}"
        if add_generation_prompt and not continue_final_message:
            text += "[assistant]"
        return Prompt(await self.tokenize(text), text)

    async def grammar_fault(self, kind: str, text: str) -> str:
        return "the grammar is refused" if "refuse" in text else ""

    async def parse_tools(
        self, text: str, tools: Sequence[Mapping[str, Any]], token_ids: Sequence[int] = ()
    ) -> tuple[str | None, tuple[ToolCall, ...]]:
        before, mark, rest = text.partition("<tool>")
        if not mark:
            return text, ()
        call, _ = json.JSONDecoder().raw_decode(rest)
        return before or None, (ToolCall(call["name"], json.dumps(call["arguments"])),)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int = 0,
        whole: bool = False,
    ) -> AsyncGenerator[Output, None]:
        if self.dead:
            raise EngineDead("the engine is dead")
        assert request_id not in self.running
        self.running.add(request_id)
        self.started.append(request_id)
        self.asked.append(sampling)
        self.peak = max(self.peak, len(self.running))
        try:
            await asyncio.sleep(self.add_delay_s)
            outputs = self._outputs(prompt, sampling)
            if whole:
                yield _joined([output async for output in outputs])
                return
            async for output in outputs:
                yield output
        finally:
            self.running.discard(request_id)

    async def _outputs(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Output, None]:
        scored = None
        if sampling.prompt_logprobs is not None:
            ids = prompt.token_ids
            scored = (
                None,
                *(self._position(ids, i, sampling.prompt_logprobs) for i in range(1, len(ids))),
            )
        if sampling.max_tokens == 0:
            yield Output(prompt_logprobs=scored, finish_reason="length")
            return
        said = _said(prompt, sampling)
        text = _Text(sampling)
        batch: list[int] = []
        for at, token in enumerate(said):
            if self.fail_after is not None and at >= self.fail_after:
                raise self.fault or RuntimeError("planted fault")
            while self.stuck:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.delay_s)
            batch.append(token)
            shown, reason = text.add(token, last=at == len(said) - 1)
            if token == EOS:
                reason = ("stop", None)
            elif reason is None and at == len(said) - 1:
                reason = ("length", None)
            if reason is None and len(batch) < self.hold and not shown:
                continue
            logprobs = None
            if sampling.logprobs is not None:
                whole = said[: at + 1]
                logprobs = tuple(
                    self._position(whole, i, sampling.logprobs)
                    for i in range(at + 1 - len(batch), at + 1)
                )
            yield Output(
                shown,
                tuple(batch),
                logprobs,
                scored,
                reason[0] if reason else None,
                reason[1] if reason else None,
            )
            batch, scored = [], None
            if reason:
                return

    def _position(self, ids: Sequence[int], at: int, k: int) -> Position:
        """Raw logprobs: of 1/2, 1/4 …, the standing token at rank 2; ` same` stands in twice."""
        token = ids[at]
        order = sorted(range(VOCAB), key=lambda t: (t * 7919 + at * 31) % VOCAB)
        order.remove(token)
        order.insert(1, token)
        found = [
            TokenLogprob(t, self._value(rank), rank, self.token_text(t))
            for rank, t in enumerate(order[: max(k, 2)], 1)
        ]
        return Position(found[1], tuple(found[:k]))

    def _value(self, rank: int) -> float:
        return -rank * math.log(2) if self.logprob is None else self.logprob

    def health(self) -> Health:
        return Health(
            alive=not self.dead,
            ready=not self.dead and not self.stuck,
            reason="the engine is dead" if self.dead else "no step for 4 s" if self.stuck else "",
            device_reason="no device is needed",
            num_running=len(self.running),
            report={"checks": {"aten::mm": "ok"}},
        )

    def metrics_text(self) -> bytes:
        return b"# HELP vllm_fake A metric of the engine\n# TYPE vllm_fake gauge\nvllm_fake 1.0\n"

    async def close(self) -> None:
        self.closed = True


def _joined(outputs: list[Output]) -> Output:
    """All outputs of a choice as one."""
    last = outputs[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(position for output in outputs for position in output.logprobs or ())
    return replace(
        last,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=logprobs,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


def _raw(token: int) -> bytes:
    if token == EOS:
        return b"<eos>"
    return bytes([token - 1]) if token < FIRST_WORD else WORDS[token - FIRST_WORD].encode()


def _said(prompt: Prompt, sampling: Sampling) -> list[int]:
    """All tokens of the answer, before any stop text: what was told, or a hash per position."""
    text = b"".join(_raw(t) for t in prompt.token_ids)
    if b"say:" in text:
        told = text.split(b"say:", 1)[1]
        for role in (b"[assistant]", b"[tools]"):
            told = told.split(role)[0]
        ids = [1 + b for b in told] + [EOS]
        return ids[: sampling.max_tokens]
    seed, choice = (0, 0) if sampling.temperature == 0 else (sampling.seed, sampling.choice)
    ids = []
    for at in range(sampling.max_tokens):
        if sampling.allowed_token_ids:
            ids.append(sampling.allowed_token_ids[at % len(sampling.allowed_token_ids)])
            continue
        key = f"{seed} {choice} {at + sampling.position_offset} {sampling.temperature}".encode()
        digest = hashlib.sha256(key + text).digest()
        ids.append(FIRST_WORD + digest[0] % len(WORDS))
    return ids


class _Text:
    """The text of an answer as it grows: whole characters, and never a part of a stop text."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole, self._sent = "", 0

    def add(self, token: int, last: bool) -> tuple[str, tuple[str, str | None] | None]:
        """(new text, (finish_reason, stop_reason) if it ends here)."""
        special = token == EOS
        if not (special and self._sampling.skip_special_tokens):
            self._whole += self._decoder.decode(_raw(token))
        if last or special:
            self._whole += self._decoder.decode(b"", final=True)
        for stop in self._sampling.stop:
            at = self._whole.find(stop, max(0, self._sent - len(stop)))
            if at >= 0:
                end = at + len(stop) if self._sampling.include_stop_str_in_output else at
                return self._take(end), ("stop", stop)
        held = 0
        if not (last or special):
            held = max((len(s) - 1 for s in self._sampling.stop), default=0)
        return self._take(max(self._sent, len(self._whole) - held)), None

    def _take(self, end: int) -> str:
        text = self._whole[self._sent : end]
        self._sent = end
        return text
