"""When something breaks: errors keep their status while they can, and no stream ends in silence."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from config.settings import Settings
from server.app import create_app
from server.errors import EngineDead, EngineFailed, InvalidRequest, NotReady
from tests.server.fake import FakeEngine
from tests.server.live import Live, serving, strict, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
FAULTS = [
    (RuntimeError("secret detail"), 500, "internal_error"),
    (EngineFailed("worker failed"), 500, "engine_error"),
    (InvalidRequest("grammar is not supported", param="structured_outputs"), 400, "invalid_value"),
    (EngineDead("the engine died"), 503, "engine_dead"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=lambda v: str(v))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_before_the_first_output(
    path: str, n: int, fault: Exception, status: int, code: str
) -> None:
    with serving(FakeEngine(fail_after=0, fault=fault)) as live:
        for stream in (False, True):
            body = {"n": n, "stream": stream, **(CHAT if "chat" in path else {"prompt": "Hello"})}
            answer = live.post(path, body)
            assert answer.status_code == status
            assert strict(answer.text)["error"]["code"] == code
            assert "secret" not in answer.text
            assert live.settled()


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=lambda v: str(v))
@pytest.mark.parametrize("after", [1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_after_some_outputs(after: int, n: int, fault: Exception, status: int, code: str) -> None:
    with serving(FakeEngine(fail_after=after, fault=fault)) as live:
        body: dict[str, Any] = {"prompt": "Hello", "n": n, "max_tokens": 10}
        chunks = live.events(**body)
        assert chunks[-1]["error"]["code"] == code
        assert len(chunks) > 1
        assert not any("error" in chunk for chunk in chunks[:-1])
        answer = live.post("/v1/completions", body)
        assert answer.status_code == status
        assert live.settled()


def test_the_openai_client_sees_a_late_error() -> None:
    import openai

    with serving(FakeEngine(fail_after=3, fault=EngineFailed("worker failed"))) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(model="fake", prompt="Hello", stream=True)
        with pytest.raises(openai.APIError, match="worker failed"):
            list(stream)


def test_a_dead_engine() -> None:
    engine = FakeEngine(delay_s=0.05)
    with serving(engine) as live:
        found: list[Any] = []
        stream = threading.Thread(
            target=lambda: found.extend(live.events(prompt="Hello", max_tokens=400))
        )
        plain = threading.Thread(
            target=lambda: found.append(
                httpx.post(live.url + "/v1/completions", json={"prompt": "a", "max_tokens": 400})
            )
        )
        stream.start()
        plain.start()
        assert until(lambda: len(engine.running) == 2, 5)
        engine.dead = True
        begun = time.monotonic()
        with httpx.Client(base_url=live.url) as probe:
            assert until(lambda: probe.get("/ready").status_code == 503, 5)
            assert probe.get("/health").status_code == 503
            assert probe.get("/health").json()["status"] == "dead"
        stream.join(5)
        plain.join(5)
        assert time.monotonic() - begun < 5
        answer = next(item for item in found if isinstance(item, httpx.Response))
        assert answer.status_code == 503
        assert any("error" in item for item in found if isinstance(item, dict))
        refused = live.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_dead"
        assert live.settled()


def test_a_stuck_engine_is_not_ready_and_recovers() -> None:
    engine = FakeEngine(delay_s=0.02)
    with serving(engine) as live:
        found: list[Any] = []
        read = threading.Thread(
            target=lambda: found.extend(live.events(prompt="Hello", max_tokens=40))
        )
        read.start()
        assert until(lambda: bool(engine.running), 5)
        engine.stuck = True
        with httpx.Client(base_url=live.url) as probe:
            assert until(lambda: probe.get("/ready").status_code == 503, 5)
            assert probe.get("/health").status_code == 200
            assert "no step" in probe.get("/ready").json()["reason"]
            assert "samebits_ready 0.0" in probe.get("/metrics").text
            engine.stuck = False
            assert until(lambda: probe.get("/ready").status_code == 200, 5)
        read.join(10)
        assert len(found) == 40, "a long step must not end anything"
        assert not any("error" in chunk for chunk in found)


def test_an_engine_that_stays_stuck_ends_what_is_open() -> None:
    engine = FakeEngine(delay_s=0.02)
    with serving(engine, stall_timeout_s=0.5) as live:
        found: list[Any] = []
        read = threading.Thread(
            target=lambda: found.extend(live.events(prompt="Hello", max_tokens=400))
        )
        read.start()
        assert until(lambda: bool(engine.running), 5)
        engine.stuck = True
        read.join(5)
        assert found[-1]["error"]["code"] == "not_ready"
        refused = httpx.post(live.url + "/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        engine.stuck = False
        assert until(lambda: live.http.get("/ready").status_code == 200, 5)
        assert live.complete(prompt="a", max_tokens=1)["choices"]


def test_a_request_that_takes_too_long() -> None:
    with serving(FakeEngine(delay_s=0.1), request_timeout_s=0.5) as live:
        answer = live.post("/v1/completions", {"prompt": "a", "max_tokens": 100})
        assert answer.status_code == 504
        assert "0.5 s" in answer.json()["error"]["message"]
        chunks = live.events(prompt="a", max_tokens=100)
        assert chunks[-1]["error"]["code"] == "timeout"
        assert live.settled()
        assert live.complete(prompt="a", max_tokens=1)["choices"]


def test_a_body_that_never_comes_to_its_end() -> None:
    with serving(request_timeout_s=0.3) as live:
        host, port = live.http.base_url.host, live.http.base_url.port or 80
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, port), 5) as client:
                client.sendall(head.encode() + b"Content-Length: 50\r\n\r\n{")
                answer = ""
                while "}}" not in answer and (more := client.recv(65536)):
                    answer += more.decode()
            assert answer.startswith("HTTP/1.1 504")
            assert "0.3 s" in answer


async def _asgi(app: Any, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        return await client.get(path)


async def test_loading_and_failing() -> None:
    go = asyncio.Event()

    async def open_engine(settings: Settings) -> FakeEngine:
        await go.wait()
        raise RuntimeError("row 3 of aten::mm differs")

    app = create_app(Settings(), open_engine)
    async with app.router.lifespan_context(app):
        assert (await _asgi(app, "/health")).json()["status"] == "loading"
        assert (await _asgi(app, "/ready")).status_code == 503
        assert (await _asgi(app, "/v1/models")).json()["error"]["code"] == "loading"
        assert (await _asgi(app, "/version")).status_code == 200
        assert (await _asgi(app, "/metrics")).status_code == 200
        go.set()
        while app.state.service.failure is None:
            await asyncio.sleep(0.01)
        assert (await _asgi(app, "/health")).status_code == 503
        assert (await _asgi(app, "/v1/models")).json()["error"]["code"] == "engine_dead"


async def test_stopping_while_loading_cancels_the_opening() -> None:
    cancelled = False

    async def open_engine(settings: Settings) -> FakeEngine:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise
        raise AssertionError

    app = create_app(Settings(), open_engine)
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0.01)
    assert cancelled


def test_all_faults_have_their_own_status() -> None:
    assert NotReady("x").body()["error"]["code"] == "not_ready"


def test_health_is_quick_under_load(live: Live) -> None:
    stop = threading.Event()
    bodies = [
        {"prompt": ["a"] * 5000, "n": 128},
        {"prompt": "a", "stop": ["x"] * 200_000},
        {"prompt": "a", "stop": "x" * 3_000_000},
        {"prompt": "a", "bad_words": ["x"] * 50_000},
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}},
        {"prompt": [1] * 500_000},
    ]

    def attack() -> None:
        with httpx.Client(base_url=live.url, timeout=30) as client:
            while not stop.is_set():
                for body in bodies:
                    assert client.post("/v1/completions", json=body).status_code == 400

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        answers = [live.http.get("/health").status_code for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert answers == [200] * 50
