"""POST /tokenize and /detokenize: text to token ids and back, as the model sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server import limits
from server.bodies import json_answer, read_body
from server.engine import Engine
from server.errors import InvalidRequest
from server.protocol import Body, Object
from server.protocol_chat import MAX_MESSAGES, ChatRequest, read_messages, read_tools
from server.service import Service, Work, service_of
from server.wire import ENTRIES_PER_SLICE, dumps, dumps_long

router = APIRouter()


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Object], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: list[Object] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Object = {}


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages through the chat template."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await read_body(request, TokenizeRequest)
    limits.check_model(body.model, engine.info)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
    async with Work.for_request(service, request):
        if body.prompt is not None:
            ids = await engine.tokenize(body.prompt, body.add_special_tokens)
        else:
            ids = await _chat_ids(service, body)
    strings = body.return_token_strs
    if len(ids) <= ENTRIES_PER_SLICE:
        return _shown(_counted(engine, ids, strings))
    async with service.parsing:
        return _shown(await asyncio.to_thread(_counted, engine, ids, strings))


def _counted(engine: Engine, ids: Sequence[int], strings: bool) -> bytes:
    """The answer of /tokenize."""
    shown = {"count": len(ids), "max_model_len": engine.info.max_model_len}
    texts = dumps_long([engine.token_text(i) for i in ids]) if strings else b"null"
    return b'%s,"tokens":%s,"token_strs":%s}' % (dumps(shown)[:-1], dumps_long(list(ids)), texts)


def _shown(raw: bytes) -> Response:
    return Response(raw, media_type="application/json")


async def _chat_ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    chat = ChatRequest.read(
        {
            "messages": body.messages,
            "tools": body.tools,
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
        },
        strict=True,
    )
    chat.check()
    prompt = await service.ready_engine().render_chat(
        read_messages(chat, strict=service.settings.strict),
        tools=read_tools(chat) or None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs or None,
    )
    return prompt.token_ids


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids; special tokens are shown."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await read_body(request, DetokenizeRequest)
    limits.check_model(body.model, engine.info)
    if len(body.tokens) > engine.info.max_model_len:
        raise InvalidRequest(
            f"tokens: {len(body.tokens)} tokens; the context is {engine.info.max_model_len}",
            param="tokens",
            code="context_length_exceeded",
        )
    limits.check_token_ids("tokens", body.tokens, engine.info.vocab_size)
    async with Work.for_request(service, request):
        text = await engine.detokenize(body.tokens)
    return json_answer({"prompt": text})
