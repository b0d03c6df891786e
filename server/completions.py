"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server import limits
from server.answers import Answer, Job, Part, join
from server.bodies import json_answer, read_body
from server.engine import Engine, Prompt
from server.errors import InvalidRequest
from server.generation import Outputs, peek, run
from server.identity import new_id
from server.logprobs import completion_logprobs, prompt_logprobs
from server.options import check_grammar, read_structured, sampling_of
from server.protocol import StreamOptions
from server.protocol_completions import CompletionRequest, read_prompts
from server.seeds import Seed, resolve
from server.service import Service, Work, service_of
from server.streaming import EventStream, event
from server.usage import Usage, wants_receipt
from server.wire import dumps

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to run."""

    id: str
    created: int
    body: CompletionRequest
    options: StreamOptions
    engine: Engine
    seed: Seed
    jobs: Sequence[Job]
    usage: Usage
    receipt: bool

    def head(self) -> dict[str, Any]:
        """What every chunk and the plain answer begin with."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.engine.info.name,
            "system_fingerprint": self.engine.fingerprint,
        }

    def answers(self) -> list[Answer]:
        """A fresh accumulator for each choice."""
        echo, logprobs = self.body.echo, self.body.logprobs is not None
        return [Answer(job, self.engine, echo=echo, logprobs=logprobs) for job in self.jobs]


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several, `n` times each, streamed or plain."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await read_body(request, CompletionRequest)
    async with Work.for_request(service, request) as work:
        call = await _prepare(service, engine, body, wants_receipt(request, body))
        outputs = run(
            service, engine, call.jobs, call.id, receipt=call.receipt, whole=not body.stream
        )
        if not body.stream:
            return json_answer(await _collect(call, outputs), headers=call.seed.headers())
        outputs = await peek(outputs)
    return EventStream(_events(call, outputs), service, work.deadline, call.seed.headers())


async def _prepare(
    service: Service, engine: Engine, body: CompletionRequest, receipt: bool
) -> Call:
    """Everything that can be refused is refused here; limits come before any work."""
    settings, info = service.settings, engine.info
    limits.check_model(body.model, info)
    body.check()
    limits.check_sampling(body, settings, info)
    options = body.options()
    raw = read_prompts(
        body.prompt,
        max_prompts=settings.max_prompts,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
    service.admission.check(len(raw) * body.n)
    _check_logprobs(body, limits.max_logprobs(settings, info))
    seed = resolve(body.seed, greedy=body.temperature == 0, policy=settings.seed_policy)
    scored = [
        k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None
    ]
    sampling = sampling_of(
        body,
        settings,
        info,
        seed=seed.value,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(scored, default=None),
        structured=read_structured(body, settings),
    )
    await check_grammar(sampling.structured, body, settings, engine)
    prompts = [await _prompt(engine, body, p, i, len(raw)) for i, p in enumerate(raw)]
    jobs = [
        Job(i * body.n + j, i, prompt, replace(sampling, choice=j + body.samebits_choice))
        for i, prompt in enumerate(prompts)
        for j in range(body.n)
    ]
    usage = Usage(sum(len(p.token_ids) for p in prompts))
    return Call(new_id("cmpl"), int(time.time()), body, options, engine, seed, jobs, usage, receipt)


def _check_logprobs(body: CompletionRequest, most: int) -> None:
    if body.logprobs is not None and body.logprobs > most:
        raise InvalidRequest(f"logprobs: {body.logprobs}; at most {most}", param="logprobs")


async def _prompt(
    engine: Engine, body: CompletionRequest, raw: str | tuple[int, ...], index: int, count: int
) -> Prompt:
    """Token ids of one prompt, cut and checked against the context; with its text where needed."""
    where = "prompt" if count == 1 else f"prompt[{index}]"
    text = raw if isinstance(raw, str) else None
    if text is not None:
        limits.check_text(text, body, engine.info, where)
    ids = await engine.tokenize(raw, body.add_special_tokens) if isinstance(raw, str) else raw
    cut = limits.truncate(ids, body, engine.info.max_model_len - body.max_tokens)
    if len(cut) != len(ids):
        ids, text = tuple(cut), None
    limits.check_context(ids, body.max_tokens, engine.info.max_model_len, where)
    if body.echo and text is None:
        text = await engine.detokenize(ids)
    return Prompt(ids, text)


async def _collect(call: Call, outputs: Outputs) -> dict[str, Any]:
    """The plain answer."""
    answers = call.answers()
    parts: list[list[Part]] = [[] for _ in answers]
    async with aclosing(outputs):
        async for at, output in outputs:
            part = answers[at].step(output)
            if part is not None:
                parts[at].append(part)
    choices = [
        _choice(call, answer, join(found)) for answer, found in zip(answers, parts, strict=True)
    ]
    return {
        **call.head(),
        "choices": choices,
        "usage": call.usage.body(answers),
        "samebits": call.usage.samebits(call.seed, answers, call.receipt),
    }


async def _events(call: Call, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream: choices as they come, then usage and receipts, then [DONE]
    elsewhere.
    """
    answers = call.answers()
    head = dumps({**call.head(), "samebits": call.seed.shown()})[:-1] + b',"choices":['
    plain_tail = b'],"usage":null}' if call.options.include_usage else b"]}"
    continuous = call.options.continuous_usage_stats
    async with aclosing(outputs):
        async for at, output in outputs:
            answer = answers[at]
            part = answer.step(output)
            if part is None or not _visible(call, part):
                continue
            tail = plain_tail
            if continuous:
                tail = b'],"usage":' + dumps(call.usage.body(answers)) + b"}"
            yield event(head + dumps(_choice(call, answer, part)) + tail)
    last: dict[str, Any] = {**call.head(), "choices": []}
    if call.options.include_usage:
        last["usage"] = call.usage.body(answers)
    if call.receipt:
        last["samebits"] = call.usage.samebits(call.seed, answers, True)
    if "usage" in last or "samebits" in last:
        yield event(dumps(last))


def _visible(call: Call, part: Part) -> bool:
    """Whether a chunk would say anything that was asked for."""
    if part.text or part.entries or part.finish_reason:
        return True
    return call.body.return_token_ids and (bool(part.token_ids) or part.first)


def _choice(call: Call, answer: Answer, part: Part) -> dict[str, Any]:
    """One choice, whole or the new part of it."""
    body = call.body
    choice: dict[str, Any] = {
        "index": answer.job.index,
        "text": part.text,
        "logprobs": None,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
    if body.logprobs is not None and (part.entries or not body.stream):
        choice["logprobs"] = completion_logprobs(
            part.entries, body.logprobs, body.return_tokens_as_token_ids
        )
    if body.return_token_ids:
        choice["token_ids"] = part.token_ids
    if part.first:
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(answer.job.prompt.token_ids)
        if body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                answer.prompt_logprobs, body.prompt_logprobs
            )
    return choice
