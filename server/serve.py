"""The process around the application: the socket, signals, the drain, and the exit code."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from server import logs
from server.app import create_app
from server.errors import Draining
from server.service import Service

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import Engine

STOPPED, ENGINE_DIED, CANNOT_START = 0, 1, 2
DEAD_GRACE_S = 5.0  # a dead engine is reported as 503 for so long before the process ends
# Seconds of silence, seconds between questions, questions without an answer.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
CLOSE_S = 5  # for answers that were cut off to reach their clients

_log = logging.getLogger("samebits")


def run(settings: Settings, open_engine: Callable[[Settings], Awaitable[Engine]]) -> int:
    """Listen, open the engine, serve until told to stop. The exit code of the process.

    The socket is bound before the engine is opened: a port in use shows at once. SIGTERM and SIGINT
    drain: new work is refused, open work has `drain_s`, then ends with an error; a second signal
    ends it at once.
    """
    logs.configure(settings)
    try:
        listener = bind(settings.host, settings.port)
    except OSError as fault:
        _log.error("can't listen on %s port %d: %s", settings.host, settings.port, fault.strerror)
        return CANNOT_START
    try:
        app = create_app(settings, open_engine)
        config = _config(app, settings)
    except (OSError, ValueError, ImportError) as fault:  # keys, certificates, traces
        _log.error("%s", fault)
        return CANNOT_START
    server = Server(config, app.state.service, listener)
    server.run(sockets=[listener])
    return server.exit_code


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration, loaded. Raises OSError on certificates that can't be used."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=False,
        server_header=False,
        lifespan="on",
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CLOSE_S,
    )
    config.load()
    return config


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError.

    Its connections send small writes at once (TCP_NODELAY): asyncio sets that only on sockets that
    name their protocol, and without it every answer waits 40 ms for an acknowledgement. Those whose
    client vanished without a word end after some two minutes (SO_KEEPALIVE): uvicorn waits for the
    first request for ever, and descriptors would run out within months.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # the system's own times elsewhere
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, with our way to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, listener: socket.socket) -> None:
        super().__init__(config)
        self.exit_code = STOPPED
        self._service, self._listener = service, listener
        self._signals = 0
        self._deadline: float | None = None
        self._dead_since: float | None = None
        self._announced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end open work now. Third SIGINT: leave at once."""
        del frame
        self._signals += 1
        if self._signals > 2 and sig == signal.SIGINT:
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: follow the engine and the signals."""
        service = self._service
        if service.failure is not None:
            _log.error("the engine could not be started: %s", service.failure)
            self.exit_code = int(getattr(service.failure, "exit_code", CANNOT_START))
            return True
        if service.engine is not None and self._follow(service):
            return True
        if self._signals and self._drained():
            return True
        return await super().on_tick(counter)

    def _follow(self, service: Service) -> bool:
        """Announce the engine once; True when it has been dead for long enough to end the
        process.
        """
        assert service.engine is not None
        if not self._announced:
            self._announced = True
            self._announce(service.engine.info.name)
        if service.engine.health().alive:
            return False
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now < self._dead_since + DEAD_GRACE_S:
            return False
        _log.error("the engine died; the process ends")
        self.exit_code = ENGINE_DIED
        return True

    def _drained(self) -> bool:
        """Start or continue the drain; True when nothing is open, or time is up and work
        was cut.
        """
        service = self._service
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + service.settings.drain_s
            service.admission.draining = True
            left = len(service.work)
            _log.info("stopping: %d open requests have %g s", left, service.settings.drain_s)
        if service.work and self._signals < 2 and now < self._deadline:
            return False
        service.stop_all(Draining("the server is shutting down"))
        return True

    def _announce(self, model: str) -> None:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if self.config.is_ssl else "http"
        url = f"{scheme}://{host}:{port}"
        _log.info("ready: %s", url)
        _log.info(
            "try: curl %s/v1/completions -H 'Content-Type: application/json' -d "
            '\'{"model": "%s", "prompt": "The future of AI is", "max_tokens": 30, "seed": 42}\'',
            url,
            model,
        )
