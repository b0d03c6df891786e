"""Clients that leave: the engine is empty again at once, in every kind of request, behind
all layers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake import FakeEngine
from tests.server.live import HEADERS, Live, serving, until

LAYERS = {"api_keys": "k", "cors_origins": "http://a", "log_format": "json"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {"prompt": "Hello"}),
    "stream": ("/v1/completions", {"prompt": "Hello", "stream": True}),
    "n=4": ("/v1/completions", {"prompt": "Hello", "n": 4}),
    "n=4 stream": ("/v1/completions", {"prompt": "Hello", "n": 4, "stream": True}),
    "list": ("/v1/completions", {"prompt": ["Hello"] * 8}),
    "list stream": ("/v1/completions", {"prompt": ["Hello"] * 8, "stream": True}),
    "echo": ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 1}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
}


@pytest.fixture(scope="module")
def slow() -> Iterator[Live]:
    with serving(FakeEngine(delay_s=0.02, add_delay_s=0.005), **LAYERS) as live:
        live.http.headers["authorization"] = "Bearer k"
        yield live


def _request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps({"max_tokens": 400, "seed": 1, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _leave(live: Live, raw: bytes, after_s: float, *, reset: bool = False) -> None:
    base = live.http.base_url
    with socket.create_connection((base.host, base.port or 80)) as client:
        if reset:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.sendall(raw)
        time.sleep(after_s)


def _resident_kib() -> int:
    """Now, not at most so far: what other tests took must not hide what this one adds."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_is_empty_within_a_second(slow: Live, kind: str, reset: bool) -> None:
    path, body = KINDS[kind]
    choices = body.get("n", 1) * (
        len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    )
    begun = len(slow.engine.started)
    _leave(slow, _request(path, body), 0.15, reset=reset)
    assert len(slow.engine.started) - begun == choices, "nothing had started: the test is void"
    assert slow.settled(1.0)
    assert until(lambda: not slow.service.work, 1.0)


@pytest.mark.parametrize("kind", ["plain", "stream", "n=4", "list stream"])
def test_leaving_within_the_first_milliseconds(slow: Live, kind: str) -> None:
    path, body = KINDS[kind]
    for step in range(20):
        _leave(slow, _request(path, body), step / 4000)
    assert slow.settled(1.0)
    assert until(lambda: not slow.service.work, 1.0)


def test_half_a_body_then_gone(slow: Live) -> None:
    raw = _request("/v1/completions", {"prompt": "Hello"})
    _leave(slow, raw[:-5], 0.05)
    _leave(slow, raw[:30], 0.05)
    assert slow.settled(1.0)
    assert slow.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}).status_code == 200


def test_neighbours_are_not_disturbed(slow: Live) -> None:
    body = {"prompt": "Hello", "seed": 9, "max_tokens": 20}
    alone = slow.complete(**body)["choices"]

    async def together() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            leaving = [
                group.create_task(asyncio.to_thread(_leave, slow, _request(*KINDS[kind]), 0.05))
                for kind in KINDS
            ]
            stays = group.create_task(asyncio.to_thread(slow.complete, **body))
        assert len(leaving) == len(KINDS)
        return stays.result()["choices"]

    assert asyncio.run(together()) == alone
    assert slow.settled(1.0)


def test_a_thousand_of_them_leave_nothing_behind() -> None:
    engine = FakeEngine(delay_s=0.01, add_delay_s=0.002)
    with serving(engine) as live:
        raw = [_request(*KINDS[kind]) for kind in ("plain", "stream", "n=4")]

        def storm(count: int) -> int:
            for index in range(count):
                _leave(live, raw[index % 3], (index % 6) / 1000)
            assert live.settled(1.0)
            engine.started.clear()
            engine.asked.clear()
            return _resident_kib()

        before = storm(200)
        after = storm(1000)
        assert after - before < 16 * 1024, f"grew by {after - before} KiB"
        assert live.service.metrics.gone._value.get() > 500  # most left before an answer


def test_the_id_of_a_request_that_was_left_is_free_at_once(slow: Live) -> None:
    body = {"prompt": "Hello", "max_tokens": 5, "seed": 2, "request_id": "mine"}
    headers = {"x-request-id": "mine"}
    alone = slow.post("/v1/completions", body, headers=headers).json()["choices"]
    other = {"prompt": " world", "max_tokens": 400, "request_id": "mine"}
    for _ in range(5):
        _leave(slow, _request("/v1/completions", other), 0.05)
        assert slow.post("/v1/completions", body, headers=headers).json()["choices"] == alone
    assert slow.settled(1.0)


@pytest.mark.slow
def test_five_thousand_short_requests_leave_nothing_behind() -> None:
    with serving() as live:

        def short(count: int) -> int:
            for _ in range(count):
                live.complete(prompt="Hello", max_tokens=1)
            live.engine.started.clear()
            live.engine.asked.clear()
            return _resident_kib()

        before = short(1000)
        assert short(4000) - before < 8 * 1024


def test_a_reader_that_is_slow_is_served(slow: Live) -> None:
    body = {"prompt": "Hello", "stream": True, "max_tokens": 30, "seed": 4}
    with slow.http.stream("POST", "/v1/completions", json=body, headers=HEADERS) as answer:
        blocks = []
        for block in answer.iter_lines():
            time.sleep(0.002)
            blocks.append(block)
    assert blocks[-2] == "data: [DONE]"
