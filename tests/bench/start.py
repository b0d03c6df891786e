"""Command to first token: `samebits serve` against stock vLLM's OpenAI server, alternately, one
run.

    .venv/bin/python tests/bench/start.py [rounds]

Second starts: both have their caches. Same model, same options, eager. Prints seconds, medians and
the ratio.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from server import demo_model

COMMON = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "64"]
KV = str(1 << 30)


def ours(model: Path, port: int) -> list[str]:
    command = [str(Path(sys.executable).parent / "samebits"), "serve", "--model", str(model)]
    return [
        *command,
        "--served-model-name",
        "m",
        "--port",
        str(port),
        *COMMON,
        "--kv-cache-memory-bytes",
        KV,
    ]


def stock(model: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [
        *command,
        "--served-model-name",
        "m",
        "--port",
        str(port),
        *COMMON,
        "--kv-cache-memory-bytes",
        KV,
        "--enforce-eager",
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_token_s(
    command: Callable[[Path, int], list[str]], model: Path, env: dict[str, str]
) -> float:
    """Seconds from starting the command to the first streamed token. Raises if it takes 5
    minutes.
    """
    port = free_port()
    body = {
        "model": "m",
        "prompt": "The capital of France is",
        "max_tokens": 1,
        "stream": True,
        "temperature": 0,
    }
    began = time.monotonic()
    process = subprocess.Popen(
        command(model, port),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while time.monotonic() < began + 300:
            if process.poll() is not None:
                raise RuntimeError(f"{command.__name__} ended with {process.returncode}")
            try:
                with httpx.stream(
                    "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60
                ) as answer:
                    if answer.status_code == 200:
                        for line in answer.iter_lines():
                            if line.startswith("data: {"):
                                return time.monotonic() - began
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"{command.__name__}: no token within 300 s")
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    model = demo_model.ensure(print)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("SAMEBITS_", "VLLM_"))}
    peers = {"stock": (stock, {**plain, "VLLM_PLUGINS": ""}), "samebits": (ours, plain)}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for round_ in range(rounds):
        for name, (command, env) in peers.items():
            seconds[name].append(first_token_s(command, model, env))
            print(f"round {round_ + 1}: {name} {seconds[name][-1]:.1f} s", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"median: stock {medians['stock']:.1f} s, samebits {medians['samebits']:.1f} s, "
        f"ratio {medians['samebits'] / medians['stock']:.2f}"
    )


if __name__ == "__main__":
    main()
