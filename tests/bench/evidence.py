"""What evidence costs: `python -m tests.bench.evidence weights | minting | receipts | replay |
all`. Prints one table each.

weights   BLAKE3 of a file in the page cache, one thread and all, and the second start from the
cache of digests minting   what a receipt and its line cost per choice and per token, over an
engine that costs nothing receipts  output tokens/s of a server that logs receipts against one that
doesn't, alternately, medians replay    `samebits replay` against the same requests sent by the
plainest client that is as concurrent
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from blake3 import blake3

from server import weights
from server.engine import Output, Position, Prompt, Sampling, TokenLogprob
from server.minting import Minter
from server.receiptlog import ReceiptLog
from tests.bench.frontend import tell
from tests.engine.conftest import SAMEBITS, clean_env, serving
from tests.server.toy import ToyEngine

PROMPTS = ["The future of AI is", "Once upon a time", "def main():", "The capital of France is"]
PATIENT = {"SAMEBITS_STEP_TIMEOUT_S": "120"}


def bench_weights(size: int = 1 << 30) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        block = os.urandom(1 << 20)
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(block)
        os.utime(path, (1, 1))
        time.sleep(weights.RACY_S + 0.5)
        data = path.read_bytes()
        alone = _best(lambda data=data: blake3(data, max_threads=1).hexdigest())
        whole = _best(lambda: weights.digest(path))
        cache = Path(folder) / "digests.json"
        first = _time(lambda: weights.digests([path], cache))
        second = _best(lambda: weights.digests([path], cache))
    print("| weights, 1 GiB in the page cache | |\n|---|---|")
    print(f"| BLAKE3, one thread | {size / alone / 1e9:.2f} GB/s |")
    print(f"| file to digest, {os.cpu_count()} cores | {size / whole / 1e9:.2f} GB/s |")
    print(f"| first start | {first:.3f} s |")
    print(f"| second start, from the cache | {second * 1000:.2f} ms |")


def bench_receipts(streams: int = 8, tokens: int = 48, rounds: int = 7) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = stack.enter_context(serving(folder / "a", **PATIENT))
        log = {"SAMEBITS_RECEIPTS": str(folder / "receipts.jsonl")}
        logged = stack.enter_context(serving(folder / "b", **PATIENT, **log))
        rates: dict[str, list[float]] = {"off": [], "on": []}
        spent: dict[str, list[float]] = {"off": [], "on": []}
        for server in (plain, logged):  # whose turn it isn't is stopped
            stack.callback(tell, server.process, signal.SIGCONT)
            tell(server.process, signal.SIGSTOP)
        for number in range(rounds + 1):
            turns = (("off", plain), ("on", logged))
            for name, server in turns if number % 2 else turns[::-1]:
                tell(server.process, signal.SIGCONT)
                before = _cpu_s(server.process.pid)
                rate = asyncio.run(_load(server.url, streams, tokens, number))
                cpu_s = _cpu_s(server.process.pid) - before
                tell(server.process, signal.SIGSTOP)
                if number:  # the first round warms up
                    rates[name].append(rate)
                    spent[name].append(1e6 * cpu_s / (streams * tokens))
    off, on = (statistics.median(rates[name]) for name in ("off", "on"))
    ratios = [b / a for a, b in zip(rates["off"], rates["on"], strict=True)]
    print(
        f"| receipts, {streams} streams × {tokens} tokens, {rounds} rounds | output tokens/s |\n"
        "|---|---|"
    )
    print(f"| off, median | {off:.1f} |\n| on, with log, median | {on:.1f} |")
    print(f"| ratio, median of rounds | {statistics.median(ratios):.3f} |")
    print(f"| ratio, lowest and highest round | {min(ratios):.3f}, {max(ratios):.3f} |")
    for name in ("off", "on"):
        low, middle, high = min(spent[name]), statistics.median(spent[name]), max(spent[name])
        print(f"| µs of CPU a token, {name}: median, range | {middle:.0f}, {low:.0f}–{high:.0f} |")


def _cpu_s(pid: int) -> float:
    """What a process and its children have used: said even where others slow the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return used + sum(_cpu_s(int(child)) for file in children for child in file.read_text().split())


def bench_minting(choices: int = 200, tokens: int = 100, rounds: int = 7) -> None:
    """The minting alone, over an engine that costs nothing: what a choice and a token pay."""
    token = TokenLogprob(5, -0.5, 1, " x")
    step = Output(" x", (5,), (Position(token, ()),))

    class Free(ToyEngine):
        async def generate(self, prompt, sampling, *, request_id, priority=0, whole=False):
            for _ in range(sampling.max_tokens - 1):
                yield step
            yield dataclasses.replace(step, finish_reason="length")

    async def run(engine, length: int) -> float:
        begun = time.perf_counter()
        for seed in range(choices):
            options = Sampling(length, seed=seed)
            async for _ in engine.generate(Prompt((7,) * 200), options, request_id="r"):
                pass
        return (time.perf_counter() - begun) / choices

    async def both(length: int, minting) -> float:
        pairs = [(await run(free, length), await run(minting, length)) for _ in range(rounds)]
        return statistics.median(b - a for a, b in pairs)

    with tempfile.TemporaryDirectory() as folder:
        free = Free()
        log = ReceiptLog(Path(folder) / "r.jsonl", {"tree": {}}, max_bytes=1 << 30)
        minting = Minter(free, log=log).over(free, wanted=True)
        one = asyncio.run(both(1, minting))
        many = asyncio.run(both(tokens, minting))
    per_token = (many - one) / (tokens - 1)
    print("| minting alone, prompt of 200 tokens, log on | |\n|---|---|")
    print(f"| per choice | {(one - per_token) * 1e6:.0f} µs |")
    print(f"| per token | {per_token * 1e6:.1f} µs |")


def bench_replay(count: int = 96, tokens: int = 16, at_once: int = 16) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "receipts.jsonl"
        with serving(folder / "log", SAMEBITS_RECEIPTS=str(log), **PATIENT) as server:
            asyncio.run(_load(server.url, count, tokens, 1))
            plain = [_time(lambda: asyncio.run(_load(server.url, count, tokens, 1, at_once)))]
            command = [SAMEBITS, "replay", str(folder / "copy.jsonl"), "--base-url", server.url]
            command += ["--concurrency", str(at_once), "--restart"]
            (folder / "copy.jsonl").write_bytes(
                b"".join(log.read_bytes().splitlines(True)[: count + 1])
            )
            replay = []

            def run() -> object:
                return subprocess.run(command, env=clean_env(), capture_output=True, check=True)

            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            for _ in range(2):
                replay.append(_time(run))
                plain.append(
                    _time(lambda: asyncio.run(_load(server.url, count, tokens, 1, at_once)))
                )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads((folder / "copy.replay.json").read_text())
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 2
    print(
        f"| replay of {count} receipts, {tokens} tokens each, {at_once} at once | seconds |\n"
        "|---|---|"
    )
    print(f"| the plainest client | {statistics.median(plain):.2f} |")
    print(f"| samebits replay, its start included | {statistics.median(replay):.2f} |")
    print(f"| of that, CPU of the client | {cpu:.2f} |")
    print(f"| found | {report['counts']} |")


async def _load(url: str, count: int, tokens: int, salt: int, at_once: int | None = None) -> float:
    """Output tokens a second of `count` seeded requests."""
    gate = asyncio.Semaphore(at_once or count)
    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=600) as http:

        async def one(number: int) -> None:
            body = {"prompt": PROMPTS[number % 4], "max_tokens": tokens, "ignore_eos": True}
            async with gate:
                answer = await http.post(
                    f"{url}/v1/completions", json={**body, "seed": 1000 * salt + number}
                )
            answer.raise_for_status()

        await asyncio.gather(*(one(i) for i in range(count)))
    return count * tokens / (time.perf_counter() - begun)


def _time(run) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _best(run, times: int = 5) -> float:
    return min(_time(run) for _ in range(times))


if __name__ == "__main__":
    which = sys.argv[1] if len(sys.argv) > 1 else "all"
    for name, bench in (
        ("weights", bench_weights),
        ("minting", bench_minting),
        ("receipts", bench_receipts),
        ("replay", bench_replay),
    ):
        if which in (name, "all"):
            bench()
            print()
