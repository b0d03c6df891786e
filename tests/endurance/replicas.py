"""Two replicas behind nginx, restarted in turn and killed, under load. One command, five minutes:

    .venv/bin/python -m tests.endurance.replicas        # or: make replicas

nginx runs with docker/nginx.conf; only its addresses are other ones. Clients ask fixed probes
through it, without retries of their own. Exit code 1 if a bit changed, or if anything was lost
that was not in flight on a replica that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.endurance.served import Findings, Served, bits, joined, status, until
from tests.endurance.soak import Body, probes

CONF = Path(__file__).parents[2] / "docker" / "nginx.conf"
CLIENTS = 6
PAUSE_S = 15
see = Findings()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


class Nginx:
    """nginx with the shipped configuration, in front of `ports`; `url` is where it listens."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        text, port = CONF.read_text(), free_port()
        for number, upstream in enumerate(ports, 1):
            text = _replaced(text, f"samebits-{number}:8000", f"127.0.0.1:{upstream}")
        text = _replaced(text, "listen 8080", f"listen 127.0.0.1:{port}")
        text = text.replace("/tmp/", f"{folder}/")
        (folder / "nginx.conf").write_text(text)
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "nginx.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["nginx", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"],
                stdout=out,
                stderr=out,
            )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def _replaced(text: str, old: str, new: str) -> str:
    if old not in text:
        raise ValueError(f"docker/nginx.conf has no {old!r}")
    return text.replace(old, new)


@dataclass(frozen=True)
class Lost:
    """A request without its whole answer."""

    asked: float
    lost: float
    words: str


@dataclass
class Load:
    """Clients that ask probes through nginx until `on` is false."""

    client: httpx.AsyncClient
    wanted: dict[str, str]
    on: bool = True
    answered: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    lost: list[Lost] = field(default_factory=list)
    slowest_s: float = 0.0

    async def asking(self, first: int) -> None:
        names = list(self.wanted)
        asked = probes()
        number = first
        while self.on:
            name = names[number % len(names)]
            number += 1
            await self.ask(name, asked[name])

    async def ask(self, name: str, asked: Body) -> None:
        began = time.monotonic()
        try:
            answer = await self.client.post("/v1/completions", json=asked)
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {answer.text[:200]}")
            found = bits(joined(answer.text) if asked.get("stream") else answer.json())
            if asked.get("stream") and not answer.text.endswith("data: [DONE]\n\n"):
                raise ValueError("a stream without its end")
        except (httpx.HTTPError, ValueError, KeyError) as fault:
            self.lost.append(Lost(began, time.monotonic(), f"{name}: {fault!r}"))
            return
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.answered[name] += 1
        if found != self.wanted[name]:
            self.changed[name] += 1

    def taken(self) -> tuple[int, list[Lost], float]:
        """Answers, losses and the slowest answer since last asked."""
        found = self.answered.total(), list(self.lost), self.slowest_s
        self.answered.clear()
        self.lost.clear()
        self.slowest_s = 0.0
        return found


async def reference(replica: Served) -> dict[str, str]:
    """The bits of every probe, asked of one replica, one by one."""
    load = Load(httpx.AsyncClient(base_url=replica.url, timeout=120), {})
    found = {}
    async with load.client:
        for name, asked in probes().items():
            answer = await load.client.post("/v1/completions", json=asked)
            answer.raise_for_status()
            found[name] = bits(joined(answer.text) if asked.get("stream") else answer.json())
    return found


async def up(replica: Served) -> float:
    """Start a replica that has stopped, and wait until it is ready; the seconds it took."""
    replica.start()
    return await asyncio.to_thread(replica.ready)


async def restarted(name: str, replica: Served, load: Load) -> None:
    """SIGTERM, wait for its end, start it again."""
    load.taken()
    began = time.monotonic()
    code = await asyncio.to_thread(replica.stop)
    drained = time.monotonic() - began
    took = await up(replica)
    await asyncio.sleep(PAUSE_S / 3)
    answered, lost, slowest = load.taken()
    see(code == 0, f"{name} restarted (SIGTERM): drained in {drained:.1f} s with exit code {code}, "
        f"ready again after {took:.0f} s")  # fmt: skip
    see(answered > 0 and not lost, f"meanwhile {answered} answers, {len(lost)} lost, the slowest "
        f"took {slowest:.1f} s{_first(lost)}")  # fmt: skip


async def killed(name: str, replica: Served, load: Load) -> None:
    """SIGKILL in the middle of things, then start it again."""
    load.taken()
    replica.process.kill()
    when = time.monotonic()
    await asyncio.to_thread(replica.process.wait)
    took = await up(replica)
    await asyncio.sleep(PAUSE_S / 3)
    answered, lost, slowest = load.taken()
    in_flight = [each for each in lost if each.asked < when and each.lost < when + 5]
    see(answered > 0 and len(in_flight) == len(lost) <= CLIENTS,
        f"{name} killed (SIGKILL), ready again after {took:.0f} s: {answered} answers, {len(lost)} "
        f"lost, {len(in_flight)} of them in flight, the slowest took {slowest:.1f} s"
        + _first(lost))  # fmt: skip


def _first(lost: list[Lost]) -> str:
    return f"; the first: {lost[0].words}" if lost else ""


async def rolling(replicas: list[Served], nginx: Nginx) -> None:
    """References, then all the restarts under load."""
    wanted = await reference(replicas[0])
    see(await reference(replicas[1]) == wanted,
        f"both replicas give the same bits to {len(wanted)} probes, and the same fingerprint, "
        "though one has other batches")  # fmt: skip
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=nginx.url, timeout=120, limits=limits) as client:
        await until(lambda: _is(client), 10)
        load = Load(client, wanted)
        clients = [asyncio.create_task(load.asking(number)) for number in range(CLIENTS)]
        await asyncio.sleep(PAUSE_S)
        answered, lost, slowest = load.taken()
        see(answered > 0 and not lost, f"through nginx, {CLIENTS} clients: {answered} answers, "
            f"{len(lost)} lost, the slowest took {slowest:.1f} s{_first(lost)}")  # fmt: skip
        for number, replica in enumerate(replicas, 1):
            await restarted(f"replica {number}", replica, load)
        await killed("replica 1", replicas[0], load)
        load.on = False
        await asyncio.gather(*clients)
        changed = dict(load.changed)
        see(not changed, f"CHANGED {changed}" if changed else "no answer differs by a bit")


async def _is(client: httpx.AsyncClient) -> bool:
    return await status(client, "/ready") == 200


def main() -> int:
    if shutil.which("nginx") is None:
        sys.stderr.write("nginx is not installed: apt-get install nginx-light\n")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="samebits-replicas-"))
    folder.chmod(0o755)
    common: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    with contextlib.ExitStack() as stack:
        replicas = []
        for number, batch in ((1, 128), (2, 256)):
            mine = folder / str(number)
            mine.mkdir()
            replicas.append(
                Served(port=free_port(), folder=mine, max_num_batched_tokens=batch, **common)
            )
            stack.callback(replicas[-1].stop)
        for replica in replicas:
            replica.ready()
        ports = [int(re.sub(r".*:", "", replica.url)) for replica in replicas]
        nginx = Nginx(folder, ports)
        stack.callback(nginx.stop)
        asyncio.run(rolling(replicas, nginx))
    if see.failed:
        sys.stdout.write(f"logs: {folder}\n")
    else:
        shutil.rmtree(folder)
    return int(see.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
