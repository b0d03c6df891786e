"""A server of one's own for hours of load or for harm, and what the kernel says of its processes.

`Served` starts `samebits serve` on a free port, with settings from keywords; `seen` prints one line
of what a check saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.engine.conftest import SAMEBITS, clean_env

MODEL = "smollm2-135m-instruct"
START_S = 300


class Served:
    """One `samebits serve`; `url` once it is ready, `log` at any time."""

    def __init__(self, *, port: int = 0, folder: Path | None = None, **settings: Any) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="samebits-endurance-"))
        self.log_path = self.folder / "server.log"
        self._settings = {f"SAMEBITS_{k.upper()}": str(v) for k, v in settings.items()}
        self._port = port
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start the process; don't wait."""
        with self.log_path.open("ab") as out:
            self.begin = out.tell()
            self.process = subprocess.Popen(
                [SAMEBITS, "serve", "--port", str(self._port)],
                env=clean_env(PYTHONFAULTHANDLER="1", **self._settings),
                stdout=out,
                stderr=out,
            )

    def ready(self) -> float:
        """Wait for the line that names the address; the seconds it took. Raises RuntimeError."""
        began = time.monotonic()
        while not (found := re.search(r"ready: (\S+)", self.log)):
            if self.process.poll() is not None or time.monotonic() > began + START_S:
                raise RuntimeError(f"no server:\n{self.log[-3000:]}")
            time.sleep(0.1)
        self.url = found[1]
        return time.monotonic() - began

    @property
    def log(self) -> str:
        """What this process has logged so far."""
        with self.log_path.open("rb") as file:
            file.seek(self.begin)
            return file.read().decode(errors="replace")

    @property
    def engine(self) -> int:
        """The process id of EngineCore."""
        for pid in children(self.process.pid):
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                return pid
        raise RuntimeError("no EngineCore below the server")

    def stop(self, timeout_s: float = 60) -> int:
        """SIGTERM, then the exit code; SIGKILL if that takes longer than `timeout_s`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def children(pid: int) -> list[int]:
    """All processes below `pid`, nearest first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def rss_bytes(pid: int) -> int:
    """Resident memory of one process, as `ps` shows it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> Counter[str]:
    """Descriptors that a process holds, by what they lead to; of TCP sockets the state."""
    states = _tcp_states(pid)
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name, _, inode = os.readlink(link).partition(":[")
            found[states.get(inode.rstrip("]"), name) if name == "socket" else name] += 1
    return found


TCP_STATES = {"01": "tcp established", "08": "tcp half closed by the client", "0A": "tcp listening"}


def _tcp_states(pid: int) -> dict[str, str]:
    """Inode of each TCP socket in the process' network: its state."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {f[9]: TCP_STATES.get(f[3], f"tcp state {f[3]}") for f in fields}


def body(**options: Any) -> dict[str, Any]:
    """A completion request; seeded, with logprobs, unless told otherwise."""
    return {
        "model": MODEL,
        "prompt": "The future of AI is",
        "max_tokens": 16,
        "temperature": 0.7,
        "seed": 42,
        "logprobs": 1,
        **options,
    }


def bits(answer: Mapping[str, Any]) -> str:
    """What may never change of an answer: texts, logprobs, reasons, fingerprint."""
    choices = [
        [c["index"], c["text"], c["finish_reason"], c["logprobs"]] for c in answer["choices"]
    ]
    found = [choices, answer["usage"]["completion_tokens"], answer["system_fingerprint"]]
    return json.dumps(found, sort_keys=True)


def joined(events: str) -> dict[str, Any]:
    """A streamed completion with usage as the plain one. Raises ValueError on an error event."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in events.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise ValueError(line)
        whole |= {k: v for k, v in chunk.items() if v is not None}
        for part in chunk["choices"]:
            one = choices.setdefault(part["index"], dict(part) | {"text": "", "logprobs": None})
            one["text"] += part["text"]
            one["finish_reason"] = part["finish_reason"] or one["finish_reason"]
            if part["logprobs"] is not None:
                arrays = one["logprobs"] = one["logprobs"] or {}
                for name, values in part["logprobs"].items():
                    arrays[name] = arrays.get(name, []) + values
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


async def until(condition: Any, timeout_s: float, every_s: float = 0.05) -> float:
    """Wait until the coroutine function `condition` is true; the seconds it took.

    Raises TimeoutError.
    """
    began = time.monotonic()
    while not await condition():
        if time.monotonic() > began + timeout_s:
            raise TimeoutError(f"not within {timeout_s} s")
        await asyncio.sleep(every_s)
    return time.monotonic() - began


async def status(client: httpx.AsyncClient, path: str) -> int:
    """The status of GET path; 0 if there is no answer within 3 s."""
    try:
        return (await client.get(path, timeout=3)).status_code
    except httpx.HTTPError:
        return 0


async def health(client: httpx.AsyncClient) -> dict[str, Any]:
    """What /health says."""
    found: dict[str, Any] = (await client.get("/health")).json()
    return found


class Findings:
    """Prints one line per check and counts those that don't hold."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, holds: bool, words: str) -> None:
        self.failed += not holds
        sys.stdout.write(f"{'ok  ' if holds else 'FAIL'}  {words}\n")
        sys.stdout.flush()
