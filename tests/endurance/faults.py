"""Does harm to a real server and says what was seen. One command, about five minutes:

    .venv/bin/python -m tests.endurance.faults          # or: make faults

Clients that cut their connections, no file descriptors left, a full disk below the receipts log,
an engine that stands still, one that is killed, and a server that is killed. Exit code 1 if a line
says FAIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from tests.endurance.served import (
    MODEL,
    Findings,
    Served,
    bits,
    body,
    health,
    open_files,
    status,
    until,
)

see = Findings()
LONG = body(max_tokens=1500, logprobs=None, ignore_eos=True, stream=True)
DEAD_S = 5.0  # issue H: /ready turns 503 within this
STALL_S = 8


async def probe(client: httpx.AsyncClient) -> str:
    """The bits of one fixed request."""
    answer = await client.post("/v1/completions", json=body(), timeout=60)
    answer.raise_for_status()
    return bits(answer.json())


async def stream(client: httpx.AsyncClient, started: asyncio.Event) -> list[str]:
    """All events of a long stream, as data lines; what came before a cut connection."""
    events = []
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=LONG, timeout=120) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                    started.set()
    return events


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, count: int = 2) -> AsyncIterator[list[asyncio.Task]]:
    """Long streams that have begun."""
    started = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(client, each)) for each in started]
    await asyncio.gather(*(each.wait() for each in started))
    yield tasks


def ended_with_error(events: list[str]) -> bool:
    """An error event, then [DONE]: no stream ends in silence."""
    return events[-1:] == ["[DONE]"] and "error" in json.loads(events[-2])


async def empty(client: httpx.AsyncClient) -> bool:
    found = await health(client)
    return found["running"] == 0


# --- harm that is survived


async def cut_connections(client: httpx.AsyncClient, served: Served) -> None:
    """Half requests, and resets in the middle of answers, streamed and plain."""
    before = await probe(client)
    host, port = served.url.removeprefix("http://").split(":")
    whole = json.dumps(LONG).encode()
    plain = json.dumps(LONG | {"stream": False}).encode()
    sockets = []
    for number in range(30):
        data = (whole, plain, whole[:40])[number % 3]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(whole if number % 3 != 1 else plain)}\r\n\r\n"  # noqa: E501
        one = socket.create_connection((host, int(port)))
        one.sendall(head.encode() + data)
        sockets.append(one)
    await until(lambda: _running(client, 10), 30)
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()  # a reset, not a farewell
    took = await until(lambda: empty(client), 30)
    see(True, f"30 connections reset in mid-answer: nothing runs any more {took:.1f} s later")
    see(await probe(client) == before, "and the probe has the same bits")


async def _running(client: httpx.AsyncClient, count: int) -> bool:
    return (await health(client))["running"] >= count


async def no_descriptors(client: httpx.AsyncClient, served: Served) -> None:
    """The server may open no more files; twenty clients knock; then it may again."""
    before, pid = await probe(client), served.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    host, port = served.url.removeprefix("http://").split(":")
    async with streaming(client, 1) as (running,):
        held = open_files(pid).total()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, limits[1]))
        knocking = [socket.create_connection((host, int(port))) for _ in range(20)]
        await asyncio.sleep(3)
        see(
            served.process.poll() is None,
            f"no descriptor left above {held}, 20 clients knock: the process stays",
        )
        see(not running.done(), "an open stream goes on meanwhile")
        for one in knocking:
            one.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        running.cancel()
    fresh = httpx.AsyncClient(base_url=served.url)
    took = await until(lambda: _is(fresh, "/ready", 200), 20)
    see(True, f"descriptors are back: a new connection is answered {took:.1f} s later")
    see(await probe(fresh) == before, "and the probe has the same bits")
    await fresh.aclose()
    await until(lambda: empty(client), 30)


async def _is(client: httpx.AsyncClient, path: str, wanted: int) -> bool:
    return await status(client, path) == wanted


async def full_disk(client: httpx.AsyncClient, served: Served, log: Path) -> None:
    """The receipts log has no room: answers without a receipt are not given. Then there is room."""
    before = await probe(client)
    with filled(log.parent, served.process.pid, log):
        for _ in range(20):  # the last page of the log may still take a line or two
            lines = log.read_bytes().count(b"\n")
            refused = await client.post("/v1/completions", json=body())
            if refused.status_code != 200:
                break
        words = refused.json()["error"]["message"]
        see(refused.status_code == 503, f"disk full: status {refused.status_code}: {words}")
        whole = [json.loads(line) for line in log.read_bytes().splitlines()]
        see(len(whole) == lines, f"no line of the log is torn ({len(whole)} whole lines)")
    took = await until(lambda: _answers(client), 30, 0.2)
    see(True, f"room again: answers again {took:.1f} s later, without a restart")
    see(await probe(client) == before, "and the probe has the same bits")


async def _answers(client: httpx.AsyncClient) -> bool:
    return (await client.post("/v1/completions", json=body())).status_code == 200


@contextlib.contextmanager
def filled(folder: Path, pid: int, log: Path) -> Iterator[None]:
    """No room: a tmpfs filled up (as root), else a limit on the size of files (of this process)."""
    if os.path.ismount(folder):
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as out:
            while True:
                out.write(b"x" * 4096)
                out.flush()
        try:
            yield
        finally:
            ballast.unlink()
        return
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 10, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


async def standing_engine(client: httpx.AsyncClient, served: Served) -> None:
    """SIGSTOP: not ready at once, open work ends with an error later, and SIGCONT heals it."""
    before = await probe(client)
    async with streaming(client) as streams:
        os.kill(served.engine, signal.SIGSTOP)
        took = await until(lambda: _is(client, "/ready", 503), 20)
        see(took <= DEAD_S, f"engine stopped (SIGSTOP): /ready is 503 after {took:.1f} s")
        began = time.monotonic()
        events = await asyncio.gather(*streams)
        waited = took + time.monotonic() - began
        see(
            all(map(ended_with_error, events)),
            f"open streams end with an error event after {waited:.1f} s "
            f"(SAMEBITS_STALL_TIMEOUT_S={STALL_S})",
        )
        refused = await client.post("/v1/completions", json=body(), timeout=10)
        see(
            refused.status_code == 503,
            f"new requests: {refused.status_code}: {refused.json()['error']['message']}",
        )
        os.kill(served.engine, signal.SIGCONT)
    took = await until(lambda: _is(client, "/ready", 200), 30)
    see(True, f"engine goes on (SIGCONT): /ready is 200 after {took:.1f} s, by itself")
    see(await probe(client) == before, "and the probe has the same bits")
    await until(lambda: empty(client), 60)
    see(True, "nothing of the lost requests is left in the engine")


# --- harm that ends the process


async def killed_engine(client: httpx.AsyncClient, served: Served) -> None:
    """SIGKILL to EngineCore: the process says so and ends with code 1."""
    async with streaming(client) as streams:
        os.kill(served.engine, signal.SIGKILL)
        began = time.monotonic()
        took = await until(lambda: _is(client, "/ready", 503), 20)
        see(took <= DEAD_S, f"engine killed (SIGKILL): /ready is 503 after {took:.1f} s")
        events = await asyncio.gather(*streams)
        see(
            all(map(ended_with_error, events)),
            f"open streams end with an error event: {events[0][-2]}",
        )
    code = await asyncio.to_thread(served.process.wait, 60)
    last = served.log.strip().splitlines()[-1]
    see(code == 1, f"the process ends with code {code} after {time.monotonic() - began:.1f} s")
    see("the engine died" in last, f"its last line: {last}")


async def killed_server(served: Served) -> None:
    """SIGKILL to the server: its engine does not stay behind."""
    engine = served.engine
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()

    async def gone() -> bool:
        return not os.path.exists(f"/proc/{engine}")

    took = await until(gone, 30)
    see(True, f"server killed (SIGKILL): its engine process is gone {took:.1f} s later")


async def harm(folder: Path) -> None:
    """Everything, on two starts."""
    log = folder / "receipts.jsonl"
    served = Served(receipts=log, stall_timeout_s=STALL_S, max_num_seqs=16)
    try:
        see(True, f"ready after {await asyncio.to_thread(served.ready):.0f} s")
        async with httpx.AsyncClient(base_url=served.url) as client:
            await cut_connections(client, served)
            await no_descriptors(client, served)
            await full_disk(client, served, log)
            await standing_engine(client, served)
            await killed_engine(client, served)
        served.start()
        see(True, f"started again, ready after {await asyncio.to_thread(served.ready):.0f} s")
        await killed_server(served)
    finally:
        served.stop()


def main() -> int:
    """A small tmpfs for the receipts log where that can be had, then all the harm."""
    folder = Path(tempfile.mkdtemp(prefix="samebits-faults-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    where = "a tmpfs of 4 MiB" if mounted.returncode == 0 else "this disk"
    sys.stdout.write(f"model {MODEL}, receipts on {where}\n")
    try:
        asyncio.run(harm(folder))
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    return int(see.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
