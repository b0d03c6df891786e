"""The application on a real socket, in a thread of its own, around a fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from config.settings import Settings
from server.app import create_app
from server.serve import bind
from server.service import Service
from tests.server.fake import FakeEngine

HEADERS = {"content-type": "application/json"}


class Live:
    """A running server: `url`, `engine`, `service`, and `http` (a plain client)."""

    def __init__(self, url: str, engine: FakeEngine, service: Service) -> None:
        self.url, self.engine, self.service = url, engine, service
        self.http = httpx.Client(base_url=url, timeout=20)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def raw(self, body: str | bytes, path: str = "/v1/completions") -> httpx.Response:
        """A body as it stands, JSON or not."""
        return self.http.post(path, content=body, headers=HEADERS)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return strict(answer.text)

    def events(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end with [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
        return [strict(block.removeprefix("data: ")) for block in blocks[:-2]]

    def settled(self, seconds: float = 1.0) -> bool:
        """Whether the engine and the admission are empty within `seconds`."""
        return until(
            lambda: not self.engine.running and self.service.admission.in_engine == 0, seconds
        )


def strict(text: str) -> Any:
    """Parse as JSON proper: NaN and Infinity are faults."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def serving(engine: FakeEngine | None = None, **changes: Any) -> Iterator[Live]:
    """A server with the given settings."""
    engine = engine or FakeEngine()

    async def open_engine(settings: Settings) -> FakeEngine:
        return engine

    app = create_app(Settings(**changes), open_engine)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
    thread.start()
    live = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, app.state.service)
    try:
        assert until(lambda: app.state.service.engine is not None, 10)
        yield live
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
    assert engine.closed
