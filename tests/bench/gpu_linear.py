"""Measure every way to compute y = x Wᵀ on a GPU: bits against one reference, and time.

    python -m tests.bench.gpu_linear OUT.json [--quick]

For each weight shape of three Qwen3 models and each M: Triton tiles, cuBLASLt's unsplit algorithms
and torch's default, in CUDA graphs over rotating copies of the weights (more than the L2 holds).
Prints the best few per (N, K, M) and writes everything as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl

from ops.kernels import cublaslt
from ops.kernels.triton.linear import Tile, linear

SHAPES = {
    "1.7b.qkv": (4096, 2048), "1.7b.o": (2048, 2048), "1.7b.gate_up": (12288, 2048),
    "1.7b.down": (2048, 6144), "1.7b.lm_head": (151936, 2048),
    "8b.qkv": (6144, 4096), "8b.o": (4096, 4096), "8b.gate_up": (24576, 4096),
    "8b.down": (4096, 12288), "8b.lm_head": (151936, 4096),
    "30b.qkv": (5120, 2048), "30b.o": (2048, 4096), "30b.gate": (128, 2048),
}  # fmt: skip
ROWS = (1, 16, 32, 64, 128, 256, 512, 4096)
REFERENCE = Tile(16, 32, 128, 4, 4)


def tiles(rows: int) -> list[Tile]:
    """Candidates for M rows."""
    small = [(16, 16, 128, 2, 8), (16, 16, 256, 2, 5), (16, 16, 256, 1, 5), (16, 16, 512, 2, 4),
             (16, 16, 256, 4, 5), (16, 32, 128, 4, 6), (16, 32, 256, 4, 4), (16, 32, 256, 4, 6),
             (16, 32, 512, 4, 3), (16, 32, 256, 2, 4), (16, 64, 128, 4, 4), (16, 64, 128, 4, 6),
             (16, 64, 256, 4, 3), (16, 64, 256, 8, 4), (16, 128, 64, 4, 6), (16, 128, 128, 4, 4),
             (16, 128, 128, 8, 4)]  # fmt: skip
    padded = [(64, 16, 128, 4, 5), (64, 16, 256, 4, 3), (64, 16, 256, 4, 4), (64, 32, 128, 4, 4),
              (64, 32, 128, 4, 6), (64, 64, 128, 4, 4), (64, 64, 64, 4, 6), (64, 128, 64, 4, 5),
              (64, 128, 128, 4, 3), (64, 256, 64, 4, 4)]  # fmt: skip
    if rows <= 16:
        found = small + padded[:5]
    elif rows <= 32:
        found = [(32, 16, 256, 2, 4), (32, 16, 128, 2, 6), (32, 32, 128, 4, 5), (32, 32, 256, 4, 3),
                 (32, 64, 128, 4, 4), (32, 64, 256, 4, 3), (32, 128, 64, 4, 5), (32, 128, 128, 4, 3),  # noqa: E501
                 *padded]  # fmt: skip
    elif rows <= 64:
        found = padded
    elif rows <= 256:
        found = [*padded[3:], (128, 32, 128, 4, 4), (128, 64, 64, 4, 5), (128, 64, 128, 4, 3),
                 (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 4)]  # fmt: skip
    else:
        found = [(128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3),
                 (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (64, 256, 64, 4, 4)]  # fmt: skip
    return [Tile(*t) for t in found]


def graph_time_us(calls: list[Any], repeats: int = 5) -> float:
    """Median microseconds per call of a CUDA graph that runs all `calls` once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """One number from TIMES blocks of x, so that each byte is read once and nothing is written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK * TIMES + tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(TIMES):
        most = tl.maximum(most, tl.load(x_ptr + at + i * BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.max(most, axis=0))


def read_tb_s(gib: int = 4) -> float:
    """The rate at which this chip reads memory that no cache holds, TB/s: the best of some ways."""
    x = torch.ones(gib * 2**28, device="cuda", dtype=torch.int32)
    out = torch.empty(x.numel() // 4096, device="cuda", dtype=torch.int32)
    found = []
    for block, times, warps in ((4096, 1, 4), (4096, 4, 8), (8192, 4, 8), (8192, 8, 16)):

        def read(block: int = block, times: int = times, warps: int = warps) -> None:
            grid = (x.numel() // (block * times),)
            _read_kernel[grid](x, out, BLOCK=block, TIMES=times, num_warps=warps)

        found.append(x.nbytes / graph_time_us([read] * 3) / 1e6)
    return max(found)


def ceilings() -> dict[str, float]:
    """Bandwidth of reads and of a copy (read and written bytes added) in TB/s, and the bf16 matrix
    rate in TFLOP/s, of this chip, now.
    """
    read = read_tb_s()
    a = torch.randn(2**30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    copy_us = graph_time_us([lambda: b.copy_(a)] * 3)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    mm_us = graph_time_us([lambda: x @ x] * 3)
    copy = 2 * a.nbytes / copy_us / 1e6
    return {"read_tb_s": read, "copy_tb_s": copy, "matmul_tflop_s": 2 * 8192**3 / mm_us / 1e6}


def compile_all(dtype: torch.dtype) -> None:
    """Build every tile once, in parallel, so that timing meets compiled kernels."""
    seen = {t for m in ROWS for t in tiles(m)} | {REFERENCE}
    x = torch.randn(16, 2048, device="cuda", dtype=dtype)
    w = torch.randn(256, 2048, device="cuda", dtype=dtype)

    def build(tile: Tile) -> None:
        try:
            linear(x, w, tile=tile)
        except Exception as fault:
            print("does not build:", tile, str(fault)[:90])

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(build, sorted(seen, key=str)))


def measure(name: str, n: int, k: int, row_counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """All candidates of one weight shape."""
    torch.manual_seed(n + k)
    copies = max(2, min(24, int(3e8 // (n * k * 2)) + 1))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.03 for _ in range(copies)]
    x_all = torch.randn(max(row_counts), k, device="cuda", dtype=torch.bfloat16)
    found: list[dict[str, Any]] = []
    whole = torch.cat([linear(x_all[i : i + 16], weights[0], tile=REFERENCE)
                       for i in range(0, min(512, max(row_counts)), 16)])  # fmt: skip
    for rows in row_counts:
        x = x_all[:rows]
        candidates: list[tuple[str, Any]] = [
            ("torch", lambda x, w: torch.nn.functional.linear(x, w))
        ]
        for t in tiles(rows):
            candidates.append((f"triton {t.block_m}x{t.block_n}x{t.block_k} w{t.num_warps} "
                               f"s{t.num_stages}",
                               lambda x, w, t=t: linear(x, w, tile=t)))  # fmt: skip
        if rows <= 64 and n <= 4096 and k % 1024 == 0:
            for s in (2, 4):
                for t in (Tile(16, 32, 256, 4, 4), Tile(64, 64, 128, 4, 4)):
                    if t.block_m >= rows or rows == 64:
                        candidates.append((f"split{s} {t.block_m}x{t.block_n}x{t.block_k}",
                                           lambda x, w, t=t, s=s: linear(x, w, tile=t, split=s, two_pass=True)))  # fmt: skip  # noqa: E501
        try:
            for i, a in enumerate(cublaslt.algorithms(rows, n, k, torch.bfloat16, 8)[:5]):
                run = cublaslt.product(a, n, k, torch.bfloat16)
                candidates.append((f"lt#{i} {a}", lambda x, w, run=run: run(x, w)))
        except cublaslt.CublasLtError as fault:
            print(name, rows, fault)
        best = []
        for label, call in candidates:
            try:
                y = call(x, weights[0])
                same = torch.equal(y[:512], whole[:rows])
                us = graph_time_us([lambda w=w, call=call: call(x, w) for w in weights],  # noqa: B023
                                   3 if rows > 512 else 5)  # fmt: skip
            except Exception as fault:
                found.append({"shape": name, "m": rows, "way": label, "fault": str(fault)[:200]})
                continue
            row = {"shape": name, "n": n, "k": k, "m": rows, "way": label, "same": same, "us": us}
            found.append(row)
            best.append(row)
        floor = max((n * k + rows * (n + k)) * 2 / 4.3e6, 2 * n * k * rows / 790e6)
        base = next((b["us"] for b in best if b["way"] == "torch"), float("nan"))
        same = sorted((b for b in best if b["same"]), key=lambda b: b["us"])
        triton = [b for b in same if b["way"].startswith("triton")]
        lt = [b for b in same if b["way"].startswith("lt")]
        other = sorted(
            (b for b in best if not b["same"] and b["way"] != "torch"), key=lambda b: b["us"]
        )
        text = [f"{b[0]['us']:.1f} {b[0]['way'][:34]}" if b else "-" for b in (triton, lt, other)]
        torch_same = any(b["same"] for b in best if b["way"] == "torch")
        print(f"{name:13s} M={rows:<5d} floor {floor:7.1f} torch "
              f"{base:7.1f}{'=' if torch_same else ' '} | "
              f"{text[0]:34s} | {text[1]:36s} | unequal: {text[2]}", flush=True)  # fmt: skip
    return found


def main() -> None:
    out = sys.argv[1]
    quick = "--quick" in sys.argv
    started = time.time()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["ceilings"] = ceilings()
    print(report, flush=True)
    compile_all(torch.bfloat16)
    print(f"compiled at {time.time() - started:.0f} s", flush=True)
    report["rows"] = []
    for name, (n, k) in SHAPES.items():
        counts = (1, 64, 256) if quick else ROWS
        if n > 100000:
            counts = (1, 16, 64, 128, 256)
        report["rows"] += measure(name, n, k, counts)
        with open(out, "w") as file:
            json.dump(report, file)
        torch.cuda.empty_cache()
    print(f"done at {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
