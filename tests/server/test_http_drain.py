"""Signals, on a process of its own: drain, deadline, second signal, exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import until

PROGRAM = """
import asyncio, os, sys
from config.settings import Settings
from server.serve import run
from tests.server.fake import FakeEngine

async def open_engine(settings):
    if {loading}:
        await asyncio.sleep(60)
    if {failing}:
        raise RuntimeError("aten::mm: row 3 differs")
    return FakeEngine(delay_s=0.1)

sys.exit(run(Settings(port={port}, drain_s={drain_s}, **{more}), open_engine))
"""


@contextmanager
def process(**changes: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"loading": False, "failing": False, "drain_s": 5, "port": port, "more": {}, **changes}
    code = PROGRAM.format(**values)
    started = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    url = f"{'https' if values.get('tls') else 'http'}://127.0.0.1:{port}"
    try:
        if not values["failing"]:
            path = "/health" if values["loading"] else "/ready"
            assert until(lambda: _up(url + path), 15), "it did not come up"
        yield started, url
    finally:
        started.kill()
        started.communicate()


def _up(url: str) -> bool:
    try:
        return httpx.get(url, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def _stream(url: str, tokens: int, found: list[str]) -> threading.Thread:
    def read() -> None:
        body = {"prompt": "Hello", "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as answer:
            found.append("".join(answer.iter_text()))

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.4)
    return thread


def test_open_streams_finish_and_new_work_is_refused() -> None:
    with process() as (server, url):
        found: list[str] = []
        threads = [_stream(url, 20, found) for _ in range(3)]
        kept = httpx.Client(base_url=url)
        assert kept.get("/ready").status_code == 200
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert kept.get("/ready").status_code == 503
        assert kept.get("/health").json()["status"] == "draining"
        refused = kept.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        kept.close()
        for thread in threads:
            thread.join(10)
        assert server.wait(10) == 0
        assert len(found) == 3
        assert all(text.endswith("data: [DONE]\n\n") and "error" not in text for text in found)


@pytest.mark.parametrize("again", [False, True], ids=["deadline", "second signal"])
def test_what_is_not_done_ends_with_an_error_event(again: bool) -> None:
    with process(drain_s=30 if again else 0.5) as (server, url):
        found: list[str] = []
        threads = [_stream(url, 400, found) for _ in range(2)]
        begun = time.monotonic()
        server.send_signal(signal.SIGTERM)
        if again:
            time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(10)
        assert server.wait(10) == 0
        assert time.monotonic() - begun < 8
        assert all('"code":"draining"' in text for text in found)
        assert all(text.endswith("data: [DONE]\n\n") for text in found)


def test_streams_that_were_cancelled_do_not_hold_the_exit() -> None:
    with process() as (server, url):
        for _ in range(5):
            body = {"prompt": "Hello", "max_tokens": 400, "stream": True}
            with httpx.stream("POST", url + "/v1/completions", json=body):
                time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


def test_a_signal_while_loading() -> None:
    with process(loading=True) as (server, url):
        assert httpx.get(url + "/ready").status_code == 503
        assert httpx.get(url + "/health").json()["status"] == "loading"
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


def test_an_engine_that_can_not_be_started() -> None:
    with process(failing=True) as (server, _):
        assert server.wait(15) == 2
        errors = server.stderr.read() if server.stderr else ""
        assert "aten::mm: row 3 differs" in errors
        assert "Traceback" not in errors


def test_tls(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    make += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    if subprocess.run(make, capture_output=True).returncode:
        pytest.skip("openssl is not installed")
    more = {"ssl_keyfile": key, "ssl_certfile": certificate}
    with process(more=more, failing=False, tls=True) as (server, url):
        with httpx.Client(verify=False, base_url=url) as client:
            assert client.get("/ready").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"ssl_keyfile": "/nowhere", "ssl_certfile": "/nowhere"},
        {"api_keys_file": "/nowhere"},
        {"api_keys": ","},
    ],
    ids=str,
)
def test_files_that_can_not_be_used(more: dict[str, str]) -> None:
    with process(failing=True, more=more) as (server, _):
        assert server.wait(15) == 2
        errors = server.stderr.read() if server.stderr else ""
        assert "Traceback" not in errors
        assert errors.strip()


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(failing=True, port=port) as (server, _):
            assert server.wait(15) == 2
            errors = server.stderr.read() if server.stderr else ""
            assert str(port) in errors
            assert "Traceback" not in errors
