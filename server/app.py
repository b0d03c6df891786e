"""create_app: the one place where settings, engine, routes, layers and error bodies meet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from server import chat, completions, models, openapi, page, probes, tokenize, tracing
from server.errors import EngineDead, InvalidRequest, NotFound, WrongMethod
from server.limits import Admission
from server.metrics import Metrics
from server.middleware import BodyCap, Edge, KeyGate, load_keys
from server.minting import Minter, check_places
from server.service import Service

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import Engine

POLL_S = 0.5
_log = logging.getLogger("samebits")


def create_app(settings: Settings, open_engine: Callable[[Settings], Awaitable[Engine]]) -> FastAPI:
    """The application. Nothing is opened before its lifespan starts.

    The engine opens in the background: /health answers at once, /ready is 503 until the engine is
    open, which is after its ops were verified. A failed opening shows in `service.failure`, and in
    /health; whoever runs the application ends the process then.
    """
    service = Service(
        settings, Admission(settings), Metrics(), tracer=tracing.open_tracer(settings)
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        opening = asyncio.create_task(_open(service, open_engine))
        watching = asyncio.create_task(_watch(service))
        try:
            yield
        finally:
            for task in (opening, watching):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await _close(service)

    app = FastAPI(
        title="Samebits",
        lifespan=lifespan,
        root_path=settings.root_path,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for routes in (completions, chat, tokenize, models, probes, page):
        app.include_router(routes.router)
    openapi.describe(app)
    app.add_exception_handler(HTTPException, _http_error)
    _add_layers(app, settings, service)
    return app


def _add_layers(app: FastAPI, settings: Settings, service: Service) -> None:
    """Innermost first: body size, keys, CORS, edge."""
    app.add_middleware(BodyCap, max_bytes=settings.max_body_bytes)
    if keys := load_keys(settings):
        app.add_middleware(KeyGate, keys=keys)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    cors = partial(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Samebits-Seed", "Retry-After"],
    )
    if origins:
        app.add_middleware(cors)
    app.add_middleware(Edge, service=service, around=cors if origins else None)


async def _http_error(request: Request, fault: Exception) -> Response:
    """The framework's own 404 and 405 in OpenAI's shape. Raised on, to be answered at the edge."""
    assert isinstance(fault, HTTPException)
    path = ascii(request.url.path[:200])
    if fault.status_code == 405:
        raise WrongMethod(f"{request.method} does not go with {path}") from None
    if fault.status_code == 404:
        raise NotFound(f"there is no {path}") from None
    raise InvalidRequest(str(fault.detail)) from None


async def _open(service: Service, open_engine: Callable[[Settings], Awaitable[Engine]]) -> None:
    try:
        check_places(service.settings)
        engine = await open_engine(service.settings)
        service.minter = Minter.from_settings(service.settings, engine)
        service.engine = engine
    except Exception as fault:
        service.failure = fault


async def _watch(service: Service) -> None:
    """Follow the engine's health.

    Without a step for a while it is not ready; a long step alone is that, too, so requests go on.
    Dead, or stalled for much longer: nothing new is taken on and all open work ends with an error.
    """
    since = 0.0
    while True:
        await asyncio.sleep(POLL_S)
        if service.engine is None:
            continue
        health = service.engine.health()
        now = asyncio.get_running_loop().time()
        if health.alive and health.ready:
            if service.stalled:
                _log.warning("the engine steps again")
            service.stalled, service.broken = "", False
            continue
        if not service.stalled:
            since = now
            _log.warning("not ready: %s", health.reason)
        service.stalled = health.reason or "the engine has stopped"
        if health.alive and now < since + service.settings.stall_timeout_s:
            continue
        if not service.broken:
            _log.error("open requests end: %s", service.stalled)
        service.broken = True
        service.stop_all(service.fault())


async def _close(service: Service) -> None:
    service.stop_all(EngineDead("the server has shut down"))
    if service.engine is not None:
        await service.engine.close()
    if service.minter is not None:
        service.minter.close()
