"""Pure ASGI layers around the routes: edge (ids, logs, counts, error bodies), keys, body size.

None of them wraps `receive` or `send` in tasks, so a client's leaving reaches the handlers.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import identity, logs, tracing
from server.errors import EngineFailed, ServerError, TooLarge, Unauthorized
from server.service import ClientGone, Service
from server.wire import dumps

if TYPE_CHECKING:
    from config.settings import Settings

# "/" is a page without data: what it shows it asks for, with the key that its user gives it.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/ping", "/"})
_log = logging.getLogger("samebits.http")


def route_path(scope: Scope) -> str:
    """The path as the routes see it: without the prefix that a proxy strips."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root + "/"):
        return path[len(root) :]
    return path


def header(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header, in order."""
    return [value for key, value in scope["headers"] if key == name]


async def send_error(
    send: Send, fault: ServerError, extra: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """`fault` as a response in OpenAI's shape."""
    body = dumps(fault.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *extra,
    ]
    if fault.retry_after_s is not None:
        headers.append((b"retry-after", str(fault.retry_after_s).encode()))
    if fault.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Edge:
    """The outermost layer of ours: every request gets an id, a log line, a count, and an answer.

    `around` goes about the answers that are made here, since they don't pass the layers inside:
    without CORS headers a page could not read why it was refused.
    """

    def __init__(
        self, app: ASGIApp, service: Service, around: Callable[[ASGIApp], ASGIApp] | None = None
    ) -> None:
        self._app, self._service, self._around = app, service, around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        token = logs.request_id.set(exchange.id)
        metrics = self._service.metrics
        metrics.open_requests.inc()
        try:
            with tracing.span(exchange.id, scope) as span:
                await self._answer(scope, receive, exchange)
                span.end(exchange.route(), exchange.status)
        finally:
            metrics.open_requests.dec()
            self._record(exchange)
            logs.request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        try:
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            exchange.gone()
            self._service.metrics.gone.inc()
        except ServerError as fault:
            self._service.metrics.refusals.labels(fault.code or "error").inc()
            if exchange.status is not None:
                raise
            await self._refuse(scope, receive, exchange, fault)
        except Exception:
            _log.exception("unexpected fault")
            if exchange.status is not None:
                raise
            internal = EngineFailed("internal error", code="internal_error")
            await self._refuse(scope, receive, exchange, internal)

    async def _refuse(
        self, scope: Scope, receive: Receive, exchange: _Exchange, fault: ServerError
    ) -> None:
        async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
            del scope, receive
            await send_error(send, fault)

        app = self._around(refusal) if self._around else refusal
        await app(scope, receive, exchange.send)

    def _record(self, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.begun
        route, status = exchange.route(), exchange.status or 500
        self._service.metrics.requests.labels(route, str(status)).inc()
        self._service.metrics.duration.labels(route).observe(seconds)
        level = logging.DEBUG if route in OPEN_PATHS else logging.INFO
        if _log.isEnabledFor(level):
            exchange.log(level, seconds)


class _Exchange:
    """One request and the state of its answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        given = header(scope, b"x-request-id")
        self.id = identity.request_id(given[0] if len(given) == 1 else None)
        self.status: int | None = None
        self.begun = time.perf_counter()

    def route(self) -> str:
        """The matched route's template; never what the client typed."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    def gone(self) -> None:
        if self.status is None:
            self.status = 499

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    def log(self, level: int, seconds: float) -> None:
        client = self._scope.get("client")
        fields: dict[str, Any] = {
            "method": self._scope["method"],
            "route": self.route(),
            "path": ascii(self._scope["path"][:200])[1:-1],
            "status": self.status or 500,
            "duration_ms": round(seconds * 1000, 2),
            "client": client[0] if client else "",
        }
        line = "{method} {path} {status} {duration_ms} ms".format(**fields)
        _log.log(level, "%s", line, extra=fields)


class KeyGate:
    """Bearer keys. Default deny: only the exact open paths pass without one, whatever is routed.

    All keys are compared, by digest and in constant time; a wrong, missing, doubled or malformed
    header is a 401 with no word on which.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")

    def _passes(self, scope: Scope) -> bool:
        if scope["type"] == "http" and route_path(scope) in OPEN_PATHS:
            return True
        values = header(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip(b" ")).digest()
        known = False
        for other in self._digests:
            known |= hmac.compare_digest(digest, other)
        return known and scheme.lower() == b"bearer"


def load_keys(settings: Settings) -> list[bytes]:
    """The keys of `api_keys` and `api_keys_file`. Raises ValueError when one is set and
    holds none.
    """
    found: list[str] = []
    if settings.api_keys is not None:
        found += settings.api_keys.split(",")
    if settings.api_keys_file is not None:
        found += Path(settings.api_keys_file).read_text(encoding="utf-8").splitlines()
    keys = [key.strip().encode() for key in found if key.strip()]
    if not keys and (settings.api_keys is not None or settings.api_keys_file is not None):
        raise ValueError("SAMEBITS_API_KEYS or SAMEBITS_API_KEYS_FILE is set and holds no key")
    return keys


class BodyCap:
    """Refuses bodies above a size: by Content-Length before reading, else while they come in."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for value in header(scope, b"content-length"):
            if value.isdigit() and int(value[:20]) > self._max_bytes:
                raise self._fault()
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._max_bytes:
                    raise self._fault()
            return message

        await self._app(scope, counted, send)

    def _fault(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._max_bytes} bytes")
