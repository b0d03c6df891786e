"""What one application holds: settings, the engine once it is open, admission, open work, counts.

Lives in `app.state.service`; no module-level state. `Work` is the one way in which a request ends
early, whoever ends it: the client leaves, time is up, the server drains, the engine stops.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from starlette.requests import Request
from starlette.types import Receive

from server.errors import EngineDead, NotReady, ServerError, TimedOut
from server.limits import Admission
from server.metrics import Metrics

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import Engine
    from server.minting import Minter


class ClientGone(Exception):
    """Nobody is left to answer. Never becomes a response."""


@dataclass(eq=False)
class Service:
    """State of the application. `engine` is None until it is open and verified."""

    settings: Settings
    admission: Admission
    metrics: Metrics
    engine: Engine | None = None
    failure: BaseException | None = None  # why the engine could not be opened
    stalled: str = ""  # why an open engine is not ready; "" when it is
    broken: bool = False  # it is dead, or has been stalled for too long: nothing is taken on
    work: set[Work] = field(default_factory=set)
    started: float = field(default_factory=time.time)
    minter: Minter | None = None
    tracer: Any = None
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of large bodies

    def ready_engine(self) -> Engine:
        """The engine. Raises `NotReady` while it loads or is stuck, `EngineDead` when it is
        gone.
        """
        if self.engine is None:
            if self.failure is not None:
                raise EngineDead("the engine could not be started")
            raise NotReady("the engine is still loading", retry_after_s=5, code="loading")
        if self.broken:
            raise self.fault()
        return self.engine

    def fault(self) -> ServerError:
        """What ends work while the engine is broken."""
        if self.engine is not None and self.engine.health().alive:
            return NotReady(self.stalled, retry_after_s=5)
        return EngineDead(self.stalled or "the engine has stopped")

    def stop_all(self, fault: ServerError) -> None:
        """End all open work with `fault`: plain answers as an error body, streams as an error
        event.
        """
        for work in tuple(self.work):
            work.stop(fault)


def service_of(request: Request) -> Service:
    """The service of the application that handles `request`."""
    service: Service = request.app.state.service
    return service


class Work:
    """A stretch of a request's own task that can be ended from outside, by `stop(fault)`.

    Inside `async with`, a stop arrives as a cancellation, so that every `finally` on the way runs;
    on leaving, it turns into `fault`. Watches the connection through `receive`, and the time.
    """

    def __init__(self, service: Service, receive: Receive, deadline: float) -> None:
        self._service, self._receive, self.deadline = service, receive, deadline
        self._fault: Exception | None = None

    @classmethod
    def for_request(cls, service: Service, request: Request) -> Work:
        """The work of one whole request, from now."""
        now = asyncio.get_running_loop().time()
        return cls(service, request.receive, now + service.settings.request_timeout_s)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        limit = self._service.settings.request_timeout_s
        late = TimedOut(f"the request took longer than {limit:g} s")
        self._timer = loop.call_at(self.deadline, self.stop, late)
        self._watch = loop.create_task(_disconnect(self._receive))
        self._watch.add_done_callback(self._disconnected)
        self._service.work.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._service.work.discard(self)
        self._timer.cancel()
        self._watch.remove_done_callback(self._disconnected)
        self._watch.cancel()
        if self._fault is None:
            return
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._fault from None

    def stop(self, fault: Exception) -> None:
        """End the work with `fault`; the first stop wins."""
        if self._fault is None:
            self._fault = fault
            self._task.cancel()

    def _disconnected(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            watch.exception()
            self.stop(ClientGone())


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
