"""Server-sent events: one response class that ends when its client does, and never ends in
silence.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.errors import EngineFailed, ServerError
from server.service import ClientGone, Service, Work
from server.wire import dumps

DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("samebits.http")


def event(data: bytes) -> bytes:
    """One event of a stream."""
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Sends `chunks` (whole events). A fault on the way becomes one `error` event, then [DONE].

    The first chunk is at hand before the response starts. The chunks are closed whatever happens.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        service: Service,
        deadline: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            chunks,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
            media_type="text/event-stream",
        )
        self._chunks, self._service, self._deadline = chunks, service, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        last = DONE
        async with aclosing(self._chunks):
            try:
                async with Work(self._service, receive, self._deadline):
                    await self._send_all(send)
            except ClientGone:
                raise
            except ServerError as fault:
                self._service.metrics.refusals.labels(fault.code or "error").inc()
                last = event(dumps(fault.body())) + DONE
            except Exception:
                _log.exception("fault in an open stream")
                internal = EngineFailed("internal error", code="internal_error")
                last = event(dumps(internal.body())) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
