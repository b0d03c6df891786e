"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server import limits, tools
from server.answers import Answer, Job, Part, join
from server.bodies import json_answer, read_body
from server.chat_parts import Delta, Message
from server.engine import Engine
from server.errors import InvalidRequest
from server.generation import Outputs, peek, run
from server.identity import new_id
from server.logprobs import prompt_logprobs
from server.options import check_grammar, read_structured, sampling_of
from server.protocol import StreamOptions
from server.protocol_chat import ChatRequest, read_messages
from server.seeds import Seed, resolve
from server.service import Service, Work, service_of
from server.streaming import EventStream, event
from server.usage import Usage, wants_receipt
from server.wire import dumps

if TYPE_CHECKING:
    from config.settings import Settings

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to run."""

    id: str
    created: int
    body: ChatRequest
    options: StreamOptions
    engine: Engine
    seed: Seed
    plan: tools.ToolPlan
    jobs: Sequence[Job]
    usage: Usage
    receipt: bool

    def head(self) -> dict[str, Any]:
        """What every chunk and the plain answer begin with."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.body.stream else "chat.completion",
            "created": self.created,
            "model": self.engine.info.name,
            "system_fingerprint": self.engine.fingerprint,
        }

    def answers(self) -> list[Answer]:
        """A fresh accumulator for each choice."""
        logprobs = self.body.logprobs
        return [Answer(job, self.engine, echo=False, logprobs=logprobs) for job in self.jobs]


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, `n` times, streamed or plain."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await read_body(request, ChatRequest)
    async with Work.for_request(service, request) as work:
        call = await _prepare(service, engine, body, wants_receipt(request, body))
        outputs = run(
            service, engine, call.jobs, call.id, receipt=call.receipt, whole=not body.stream
        )
        if not body.stream:
            return json_answer(await _collect(call, outputs), headers=call.seed.headers())
        outputs = await peek(outputs)
    return EventStream(_events(call, outputs), service, work.deadline, call.seed.headers())


async def _prepare(service: Service, engine: Engine, body: ChatRequest, receipt: bool) -> Call:
    """Everything that can be refused is refused here; limits come before any work."""
    settings, info = service.settings, engine.info
    limits.check_model(body.model, info)
    body.check()
    limits.check_sampling(body, settings, info)
    _check_top_logprobs(body, limits.max_logprobs(settings, info))
    options = body.options()
    messages = read_messages(body, strict=settings.strict)
    for index, message in enumerate(messages):
        limits.check_text(message["content"] or "", body, info, f"messages[{index}].content")
    plan = tools.plan(body, info)
    service.admission.check(body.n)
    structured = _structured(body, plan, settings)
    await check_grammar(structured, body, settings, engine)
    seed = resolve(body.seed, greedy=body.temperature == 0, policy=settings.seed_policy)
    prompt = await engine.render_chat(
        messages,
        tools=plan.tools or None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs or None,
    )
    ids = tuple(limits.truncate(prompt.token_ids, body, info.max_model_len - (_asked(body) or 1)))
    max_tokens = _asked(body) or max(1, info.max_model_len - len(ids))
    limits.check_context(ids, max_tokens, info.max_model_len, "messages")
    sampling = sampling_of(
        body,
        settings,
        info,
        seed=seed.value,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured=structured,
    )
    prompt = replace(prompt, token_ids=ids)
    first = body.samebits_choice
    jobs = [Job(j, 0, prompt, replace(sampling, choice=first + j)) for j in range(body.n)]
    now = int(time.time())
    usage = Usage(len(ids))
    return Call(new_id("chatcmpl"), now, body, options, engine, seed, plan, jobs, usage, receipt)


def _asked(body: ChatRequest) -> int | None:
    return body.max_completion_tokens or body.max_tokens


def _check_top_logprobs(body: ChatRequest, most: int) -> None:
    if body.top_logprobs is not None and body.top_logprobs > most:
        raise InvalidRequest(
            f"top_logprobs: {body.top_logprobs}; at most {most}", param="top_logprobs"
        )


def _structured(
    body: ChatRequest, plan: tools.ToolPlan, settings: Settings
) -> tuple[str, str] | None:
    asked, forced = read_structured(body, settings), plan.structured()
    if asked and forced:
        raise InvalidRequest(
            "response_format: tool_choice already fixes the form of the answer",
            param="response_format",
        )
    return forced or asked


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
        await Message(call.body, call.plan, answer).choice(call.engine, join(found))
        for answer, found in zip(answers, parts, strict=True)
    ]
    shown = {
        **call.head(),
        "choices": choices,
        "usage": call.usage.body(answers),
        "samebits": call.usage.samebits(call.seed, answers, call.receipt),
    }
    if call.body.prompt_logprobs is not None and answers[0].prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(
            answers[0].prompt_logprobs, call.body.prompt_logprobs
        )
    if call.body.return_token_ids:
        shown["prompt_token_ids"] = list(call.jobs[0].prompt.token_ids)
    return shown


async def _events(call: Call, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream: deltas as they come, then usage and receipts."""
    answers = call.answers()
    deltas = [Delta(call.body, call.plan, answer) for answer in answers]
    head = dumps({**call.head(), "samebits": call.seed.shown()})[:-1] + b',"choices":['
    plain_tail = b'],"usage":null}' if call.options.include_usage else b"]}"
    async with aclosing(outputs):
        async for at, output in outputs:
            part = answers[at].step(output)
            choice = await deltas[at].choice(call.engine, part) if part is not None else None
            if choice is None:
                continue
            tail = plain_tail
            if call.options.continuous_usage_stats:
                tail = b'],"usage":' + dumps(call.usage.body(answers)) + b"}"
            yield event(head + dumps(choice) + tail)
    last: dict[str, Any] = {**call.head(), "choices": []}
    if call.options.include_usage:
        last["usage"] = call.usage.body(answers)
    if call.receipt:
        last["samebits"] = call.usage.samebits(call.seed, answers, True)
    if "usage" in last or "samebits" in last:
        yield event(dumps(last))
