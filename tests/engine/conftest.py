"""One real server on the demo model for all tests of this ring; a process of its own, a real
socket.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

SAMEBITS = str(Path(sys.executable).parent / "samebits")
START_S = 240


def clean_env(**extra: str) -> dict[str, str]:
    """This process' environment without settings of ours or vLLM's, but with `extra`."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SAMEBITS_", "VLLM_")) or k == "SAMEBITS_CACHE_DIR"
    }
    return kept | extra


@dataclass
class Running:
    """A server that answers: its address, its process, and its log so far."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=120)


@contextmanager
def serving(
    log: Path, *args: str, command: tuple[str, ...] = (SAMEBITS, "serve"), **env: str
) -> Iterator[Running]:
    """`samebits serve` with these arguments, ready; stopped by SIGTERM on leaving."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", "0", *args],
            env=clean_env(**env),
            cwd=Path(__file__).parents[2],
            stdout=out,
            stderr=out,
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"ready: (\S+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)
        yield Running(found[1], process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The demo model with default settings."""
    with serving(tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run `samebits serve` until it ends by itself: (exit code, stderr)."""

    def run(*args: str, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            [SAMEBITS, "serve", "--port", "0", *args],
            env=clean_env(**env),
            capture_output=True,
            text=True,
            timeout=START_S,
            cwd=tmp_path,
        )
        return done.returncode, done.stderr

    return run
