"""Reading a request's body and writing a JSON answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.errors import TimedOut, WrongContentType
from server.limits import check_counts
from server.protocol import Body
from server.service import ClientGone, service_of
from server.wire import LARGE_BYTES, MAX_ENTRIES, dumps, loads

B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B]) -> B:
    """The body as `model`. Raises `InvalidRequest`, `WrongContentType`, `TimedOut`, or
    `ClientGone`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType("send the body with the header Content-Type: application/json")
    service = service_of(request)
    settings = service.settings
    try:
        async with asyncio.timeout(settings.request_timeout_s):
            raw = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        limit = settings.request_timeout_s
        raise TimedOut(f"the body was not here after {limit:g} s") from None

    allowed = settings.max_logit_bias + settings.max_bad_words + settings.max_prompts
    entries = max(MAX_ENTRIES, 2 * allowed)

    def parse() -> B:
        found = loads(raw, max_depth=settings.max_json_depth, max_entries=entries)
        check_counts(found, settings)
        return model.read(found, strict=settings.strict)

    if len(raw) <= LARGE_BYTES:
        return parse()
    async with service.parsing:  # one at a time, or their threads outvote the loop's
        return await asyncio.to_thread(parse)


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(dumps(value), status, headers, media_type="application/json")
