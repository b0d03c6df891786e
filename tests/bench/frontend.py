"""The front end against stock vLLM's OpenAI server, on a tiny random model, in one run.

    .venv/bin/python tests/bench/frontend.py [rounds]

Both servers stay up; the loads alternate between them, and the one whose turn it isn't is stopped
(SIGSTOP), so that no idle loop takes a core. The model is so small that what is measured
is HTTP, JSON, tokenizing and the road to the engine and back. Prints medians and ratios: requests/s
(plain, 16 tokens), tokens/s (64 streams of 64 tokens), time to first token of one stream, and
resident memory of the front-end process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.bench.start import free_port
from tests.bench.streams import family
from tests.engine.conftest import clean_env

PLAIN, STREAMS, TOKENS, FIRSTS = 400, 64, 64, 40
OPTIONS = ["--served-model-name", "m", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
OPTIONS += ["--kv-cache-memory-bytes", str(1 << 28), "--max-model-len", "1024"]


def tiny_model(folder: Path) -> Path:
    """A Llama of two layers, random weights, and 1,024 tokens: bytes and pairs learned from the
    README. (With a vocabulary of 49,152 the LM head and the draw would be what is measured.)
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ByteLevelBPETokenizer()
    readme = Path(__file__).parents[2] / "README.md"
    words.train(str(readme), vocab_size=1024, special_tokens=["<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=2048,
        eos_token_id=0, bos_token_id=0, initializer_range=0.03,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def _post(port: int, body: dict[str, Any]) -> tuple[float, int]:
    """Send one request on a connection of its own; (seconds to the first event, bytes read)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps({"model": "m", "temperature": 1, "seed": 1, "ignore_eos": True, **body})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    begun = time.perf_counter()
    writer.write((head + raw).encode())
    status = await reader.readline()
    assert b" 200 " in status, status
    await reader.readuntil(b"\r\n\r\n")
    read = len(await reader.readline())
    first = time.perf_counter() - begun
    while chunk := await reader.read(1 << 16):
        read += len(chunk)
    writer.close()
    return first, read


async def plain(port: int) -> float:
    """Requests per second, 32 at a time."""
    gate = asyncio.Semaphore(32)

    async def one(index: int) -> None:
        async with gate:
            await _post(port, {"prompt": f"Request number {index} says", "max_tokens": 16})

    begun = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(PLAIN)))
    return PLAIN / (time.perf_counter() - begun)


async def streams(port: int) -> float:
    """Tokens per second over all streams."""
    body = {"max_tokens": TOKENS, "stream": True}
    begun = time.perf_counter()
    await asyncio.gather(*(_post(port, {"prompt": f"Stream {i}", **body}) for i in range(STREAMS)))
    return STREAMS * TOKENS / (time.perf_counter() - begun)


async def first_token(port: int) -> float:
    """Milliseconds to the first event of a stream that is alone."""
    body = {"prompt": "The future of AI is", "max_tokens": 2, "stream": True}
    return 1000 * statistics.median([(await _post(port, body))[0] for _ in range(FIRSTS)])


async def engine_free(port: int) -> float:
    """Requests per second that never reach the engine (a 400 each): HTTP and JSON alone."""
    begun = time.perf_counter()
    close = {"connection": "close"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=close) as client:
        for _ in range(100):
            await client.post("/v1/completions", json={"model": "m", "prompt": "a", "n": 0})
    return 100 / (time.perf_counter() - begun)


LOADS: dict[str, Callable[[int], Awaitable[float]]] = {
    "plain requests/s": plain,
    "streamed tokens/s": streams,
    "ms to first token": first_token,
    "refused requests/s": engine_free,
}


def start(command: list[str], port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *OPTIONS, "--port", str(port)], env=clean_env(), stdout=out, stderr=out
        )
    for _ in range(600):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.5)
    process.kill()
    raise SystemExit(f"no server: {log.read_text()[-2000:]}")


def rss_mib(pid: int) -> float:
    """Resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main(rounds: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder) / "model"))
        samebits = str(Path(sys.executable).parent / "samebits")
        module = "vllm.entrypoints.openai.api_server"
        stock = [sys.executable, "-m", module, "--model", model, "--enforce-eager"]
        stock += ["--disable-log-stats", "--no-enable-log-requests"]
        commands = {"samebits": [samebits, "serve", "--model", model], "stock": stock}
        ports = {name: free_port() for name in commands}
        processes = {
            name: start(command, ports[name], Path(folder) / f"{name}.log")
            for name, command in commands.items()
        }
        try:
            report(rounds, ports, processes)
        finally:
            for process in processes.values():
                tell(process, signal.SIGCONT)
                process.terminate()
            for process in processes.values():
                process.wait(60)


def tell(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a server and all its processes."""
    for pid in family(process.pid):
        os.kill(pid, number)


def report(
    rounds: int, ports: dict[str, int], processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    """Warm both up, alternate, print medians and the ratio of ours to stock."""
    found: dict[str, dict[str, list[float]]] = {load: {} for load in LOADS}
    for process in processes.values():
        tell(process, signal.SIGSTOP)
    for round_number in range(rounds + 1):
        for load, run in LOADS.items():
            for name, port in ports.items():
                tell(processes[name], signal.SIGCONT)
                value = asyncio.run(run(port))
                tell(processes[name], signal.SIGSTOP)
                if round_number:
                    found[load].setdefault(name, []).append(value)
    rows = {load: {n: statistics.median(v) for n, v in by.items()} for load, by in found.items()}
    rows["front end MiB"] = {name: rss_mib(p.pid) for name, p in processes.items()}
    for load, row in rows.items():
        ratio = row["samebits"] / row["stock"]
        print(f"{load:20} ours {row['samebits']:9.1f} stock {row['stock']:9.1f} ratio {ratio:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
