"""Output tokens/s against the number of streams: ours, stock eager and stock compiled, in one run.

    python -m tests.bench.streams [--dtype bfloat16 float32] [--rounds 3] [--plot FILE.svg]
        [--json FILE] [--no-compiled]

Three servers of the demo model on one machine. Those whose turn it isn't are stopped (SIGSTOP), so
that no idle loop takes a core. Loads take turns server by server, round by round; medians are
printed, and ratios to the better of stock's two. Also: a prompt of 512 tokens, the share of the
read bandwidth that one stream reaches (bytes of weights per token over seconds per token, beside
plain reads measured in the same run), and the memory of all processes of a server (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from server import demo_model
from tests.bench.start import free_port
from tests.engine.conftest import clean_env

POINTS = (1, 2, 4, 6, 16, 32, 64)
TABLE = (1, 6, 32)
TOKENS, PREFILL = 48, 512
COMMON = ["--served-model-name", "m", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
COMMON += ["--kv-cache-memory-bytes", str(1 << 29), "--max-model-len", "1024"]


def family(pid: int) -> list[int]:
    """A process and all that it started, eldest first."""
    found, at = [pid], 0
    while at < len(found):
        for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
        at += 1
    return found


class Server:
    """One server and its processes; `with server:` lets it run, else it is stopped."""

    def __init__(self, name: str, model: Path, dtype: str, log: Path) -> None:
        self.name, self.port = name, free_port()
        command = [str(Path(sys.executable).parent / "samebits"), "serve"]
        env = clean_env()
        if name != "samebits":
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            command += ["--no-enable-prefix-caching", "--no-enable-log-requests"]
            command += ["--enforce-eager"] if name == "stock eager" else []
            env["VLLM_PLUGINS"] = ""
        else:
            command += ["--enable-prefix-caching", "false"]
        command += ["--model", str(model), "--dtype", dtype, *COMMON, "--port", str(self.port)]
        begun = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, start_new_session=True
            )
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > begun + 900:
                raise SystemExit(f"{name}: no server: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        sys.stdout.write(f"{dtype} {name}: up after {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
        self._signal(signal.SIGSTOP)

    def _answers(self) -> bool:
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        try:
            return httpx.post(url, json=body, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def _signal(self, number: int) -> None:
        for pid in family(self.process.pid):
            os.kill(pid, number)

    def __enter__(self) -> Server:
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def mib(self) -> float:
        """Memory of all its processes: shared pages counted once (PSS)."""
        total = 0
        for pid in family(self.process.pid):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.split("\nPss:")[1].split()[0])
        return total / 1024

    def end(self) -> None:
        pids = family(self.process.pid)
        self._signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in pids[1:]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


async def _complete(port: int, prompt: Any, tokens: int) -> None:
    """One streamed completion on a connection of its own, read to its end."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write((head + raw).encode())
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:20] or f'"completion_tokens":{tokens}'.encode() not in answer:
        raise SystemExit(f"port {port}: {answer[:500]!r}")


async def tokens_per_s(port: int, streams: int) -> float:
    """Tokens of all streams per second, from the first request to the last token."""
    begun = time.perf_counter()
    await asyncio.gather(
        *(_complete(port, f"Stream number {i} begins with", TOKENS) for i in range(streams))
    )
    return streams * TOKENS / (time.perf_counter() - begun)


async def prefill_ms(port: int, salt: random.Random) -> float:
    """Milliseconds of a prompt of 512 token ids never seen before, and one token."""
    begun = time.perf_counter()
    await _complete(port, [salt.randrange(1000, 40000) for _ in range(PREFILL)], 1)
    return 1000 * (time.perf_counter() - begun)


def weight_bytes(model: Path, dtype: str) -> int:
    """Bytes of weights that one token reads: every weight once (embedding and head are tied)."""
    from safetensors import safe_open

    numbers = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():
                numbers += math.prod(weights.get_slice(name).get_shape())
    return numbers * (4 if dtype == "float32" else 2)


def read_gb_per_s() -> float:
    """Plain reads of 256 MiB by all cores."""
    import torch

    from ops.kernels.cpu import load

    big, kernels = torch.ones(64 << 20), load()
    begun = time.perf_counter()
    kernels.read_all(big)
    return big.numel() * 4e-9 / (time.perf_counter() - begun)


def measure(servers: list[Server], rounds: int) -> dict[str, dict[str, float]]:
    """{what: {server: median}}; the points outside of the table are measured once."""
    found: dict[str, dict[str, list[float]]] = {}
    bandwidth: list[float] = []
    for number in range(rounds + 1):  # the first warms up
        salt = random.Random(number)
        points = POINTS if number == 1 else TABLE if number else (6,)
        for streams in points:
            for server in servers:
                with server:
                    value = asyncio.run(tokens_per_s(server.port, streams))
                if number:
                    what = f"{streams} streams, tokens/s"
                    found.setdefault(what, {}).setdefault(server.name, []).append(value)
        for server in servers:
            with server:
                repeats = [asyncio.run(prefill_ms(server.port, salt)) for _ in range(3)]
            if number:
                by_name = found.setdefault("prompt of 512 tokens, ms", {})
                by_name.setdefault(server.name, []).extend(repeats)
        bandwidth += [read_gb_per_s() for _ in range(5)]
    rows = {w: {n: statistics.median(v) for n, v in by.items()} for w, by in found.items()}
    rows["memory, MiB"] = {server.name: server.mib() for server in servers}
    rows["plain reads, GB/s"] = {"machine": statistics.median(bandwidth)}
    return rows


def show(dtype: str, rows: dict[str, dict[str, float]], weights: int) -> None:
    """The table, with ratios to the better of stock's."""
    sys.stdout.write(f"\n{dtype}\n")
    for what, row in rows.items():
        stock = [value for name, value in row.items() if name.startswith("stock")]
        cells = "  ".join(f"{name} {value:.1f}" for name, value in row.items())
        if stock:
            best = max(stock) if "/s" in what else min(stock)
            cells += f"  ratio {row['samebits'] / best:.2f}"
        sys.stdout.write(f"{what:26} {cells}\n")
    per_s = rows["1 streams, tokens/s"]
    for name, value in per_s.items():
        share = value * weights / 1e9 / rows["plain reads, GB/s"]["machine"]
        sys.stdout.write(f"share of the bandwidth with one stream: {name} {share:.2f}\n")
    sys.stdout.flush()


def plot(results: dict[str, dict[str, dict[str, float]]], file: str) -> None:
    """Tokens/s against streams, one panel per dtype."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "samebits"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4), squeeze=False)
    for panel, (dtype, rows) in zip(panels[0], results.items(), strict=True):
        for name in next(iter(rows.values())):
            panel.plot(
                POINTS, [rows[f"{n} streams, tokens/s"][name] for n in POINTS], "o-", label=name
            )
        panel.set(xscale="log", xticks=POINTS, xticklabels=POINTS, xlabel="streams", title=dtype)
        panel.minorticks_off()
        panel.set(ylabel="output tokens/s", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot")
    parser.add_argument("--json")
    parser.add_argument("--no-compiled", action="store_true", help="leave stock compiled out")
    args = parser.parse_args()
    model = Path(demo_model.ensure(print))
    names = ["samebits", "stock eager", *([] if args.no_compiled else ["stock compiled"])]
    results = {}
    for dtype in args.dtype:
        servers: list[Server] = []
        with tempfile.TemporaryDirectory() as logs:
            try:
                for name in names:
                    servers.append(Server(name, model, dtype, Path(logs) / name))
                results[dtype] = measure(servers, args.rounds)
            finally:
                for server in servers:
                    server.end()
        show(dtype, results[dtype], weight_bytes(model, dtype))
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
