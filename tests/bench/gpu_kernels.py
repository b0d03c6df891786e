"""Times of single kernels on a GPU beside what they replace; needs vLLM for CUDA.

    python -m tests.bench.gpu_kernels OUT.json [PART ...]

Parts: ceilings products norms softmaxes experts sampling attentions. CUDA graphs of repeated
launches, medians; microseconds. Sampling is timed eagerly, as it runs.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from ops.bindings_cuda import moe_tile
from ops.bindings_cuda_check import _randn, paged
from ops.kernels.dense import planner
from ops.kernels.triton import attention as att
from ops.kernels.triton import moe, norm, softmax
from ops.kernels.triton.linear import Tile
from tests.bench import gpu_linear
from tests.bench.gpu_linear import graph_time_us

report: list[dict[str, Any]] = []


def row(what: str, **times: Any) -> None:
    """One line of the table: name → microseconds (or a word)."""
    report.append({"what": what, **times})
    cells = (f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in times.items())
    print(f"{what:44s} " + "  ".join(cells), flush=True)


def timed(call: Any) -> float:
    """Microseconds, or NaN where it does not run."""
    try:
        return graph_time_us([call] * 10)
    except Exception as fault:
        print("  fault:", str(fault)[:150])
        return float("nan")


def _norm(rows: int, columns: int) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    x, r, w = _randn(rows, columns), _randn(rows, columns, seed=1), _randn(columns)
    out = torch.empty_like(x)
    row(f"rms_norm [{rows}, {columns}]",
        ours=timed(lambda: norm.rms_norm(x, w, 1e-6)),
        ours_add=timed(lambda: norm.rms_norm(x, w, 1e-6, r)),
        vllm_c=timed(lambda: ops.rms_norm(out, x, w, 1e-6)),
        vllm_invariant=timed(lambda: rms_norm_batch_invariant(x, w, 1e-6)))  # fmt: skip


def norms() -> None:
    for columns in (128, 2048, 4096):
        for rows in (1, 128, 4096):
            _norm(rows, columns)


def _softmax(rows: int) -> None:
    from vllm.model_executor.layers.batch_invariant import log_softmax as theirs

    x = _randn(rows, 151936, dtype=torch.float32)
    row(f"log_softmax [{rows}, 151936]",
        ours=timed(lambda: softmax.log_softmax(x)),
        torch=timed(lambda: torch.log_softmax(x, -1)),
        vllm_invariant=timed(lambda: theirs(x)))  # fmt: skip


def softmaxes() -> None:
    for rows in (1, 8, 128):
        _softmax(rows)


def _attention(heads: int, kv_heads: int, batch: int, context: int, new: int) -> None:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    d = paged([context] * batch, heads, kv_heads, 128)
    q = _randn(batch * new, heads, 128, seed=9)
    start = torch.arange(0, batch * new + 1, new, device="cuda", dtype=torch.int32)
    used = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)

    def fa3(splits: int) -> Any:
        return lambda: flash_attn_varlen_func(
            q=q, k=d["k"], v=d["v"], out=out, cu_seqlens_q=start, max_seqlen_q=new,
            seqused_k=used, max_seqlen_k=context, softmax_scale=128**-0.5, causal=True,
            window_size=[-1, -1], block_table=d["table"], fa_version=3,
            num_splits=splits)  # fmt: skip

    def triton(segment: int, parallel: bool, schedule: att.Schedule) -> Any:
        count = -(-context // segment) if parallel else 0
        return lambda: att.attention(q, d["k"], d["v"], d["table"], start, used, 128**-0.5,
                                     schedule=schedule, segment=segment,
                                     parallel_segments=count)  # fmt: skip

    small, wide = att.Schedule(16, 4, 3), att.Schedule(64, 4, 3)
    one = wide if new > 1 else small
    base = triton(512, False, one)()
    same = all(torch.equal(base, f()) for f in (
        triton(512, True, one), triton(512, False, small), triton(512, False, wide),
        triton(512, True, wide), triton(512, False, att.Schedule(128, 8, 2))))  # fmt: skip
    fa3(1)()
    error = ((base.float() - out.float()).norm() / out.float().norm()).item()
    read = batch * context * kv_heads * 128 * 2 * 2 / 1e6  # of the cache, in Mbyte
    row(f"attention {heads}/{kv_heads} batch {batch} context {context} new {new}", read_mb=read,
        fa3_heuristic=timed(fa3(0)), fa3_one=timed(fa3(1)),
        triton=timed(triton(512, False, one)),
        triton_128=timed(triton(512, False, att.Schedule(128, 8, 2))) if new > 1 else "-",
        segments_512=timed(triton(512, True, one)),
        segments_1024=timed(triton(1024, True, one)),
        bits_equal=same, error=f"{error:.1e}")  # fmt: skip


def attentions() -> None:
    cases = [(b, c, 1) for b in (1, 8, 128) for c in (512, 2048, 8192)]
    cases += [(1, 32768, 1), (1, 4096, 4096), (8, 512, 512), (1, 8192, 512)]
    for heads, kv_heads in ((32, 8), (16, 8)):
        for batch, context, new in cases:
            _attention(heads, kv_heads, batch, context, new)


def _experts(w13: torch.Tensor, w2: torch.Tensor, rows: int) -> None:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    x = _randn(rows, 2048, seed=3)
    scores = _randn(rows, 128, seed=4, dtype=torch.float32)
    weights, ids = torch.softmax(scores, -1).topk(8, -1)
    ids = ids.int()
    found = {}
    for t in (Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 3), Tile(64, 128, 64, 4, 3),
              Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 4)):  # fmt: skip
        found[f"{t.block_m}x{t.block_n}x{t.block_k}"] = timed(
            lambda t=t: moe.moe(x, w13, w2, weights, ids, tile=t)
        )
    sort = timed(lambda: moe.sort_by_expert(ids, 128, 64))
    best = min(found, key=lambda k: found[k] if found[k] == found[k] else 1e9)
    row(f"moe 128 experts, 8 of them, {rows} tokens", best=best, ours=found[best], sort=sort,
        vllm_stock_tiles=timed(lambda: fused_experts(x, w13, w2, weights, ids)))  # fmt: skip


def experts() -> None:
    w13, w2 = _randn(128, 1536, 2048, scale=0.02), _randn(128, 2048, 768, scale=0.02)
    for rows in (1, 16, 64, 128, 1024, 4096):
        _experts(w13, w2, rows)
    print(moe_tile((128, 1536, 2048), (128, 2048, 768), 8, None, 128))


def products() -> None:
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    for n, k in ((4096, 4096), (24576, 4096), (4096, 12288), (2048, 6144)):
        copies = max(2, int(3e8 // (n * k * 2)) + 1)
        weights = [_randn(n, k, seed=i, scale=0.03) for i in range(copies)]
        planner.plan(weights[0])
        for rows in (1, 16, 64, 128, 4096):
            x = _randn(rows, k, seed=5)
            ways = {
                "ours": lambda w, x=x: planner.product(x, w, None),
                "cublas": lambda w, x=x: torch.nn.functional.linear(x, w),
                "vllm_persistent": lambda w, x=x: matmul_persistent(x, w.t()),
            }
            us = {name: graph_time_us([lambda w=w, f=f: f(w) for w in weights])
                  for name, f in ways.items()}  # fmt: skip
            tb = (n * k + rows * (n + k)) * 2 / us["ours"] / 1e6
            row(f"linear M={rows} N={n} K={k}", **us, ours_tb_s=f"{tb:.2f}",
                ours_tflop_s=f"{2 * n * k * rows / us['ours'] / 1e6:.0f}")  # fmt: skip


def _draw(rows: int) -> None:
    from ops.sampling import draw

    logits = _randn(rows, 151936, dtype=torch.float32, seed=6)
    generators = [torch.Generator("cuda").manual_seed(i) for i in range(rows)]

    def ours(top_k: int, top_p: float) -> Any:
        return lambda: draw(logits, [1.0] * rows, [top_k] * rows, [top_p] * rows, [0.0] * rows,
                            list(range(rows)), [0] * rows, [7] * rows)  # fmt: skip

    def stock() -> Any:
        p = logits.softmax(-1, dtype=torch.float32)
        q = torch.empty_like(p)
        for i, g in enumerate(generators):
            q[i].exponential_(generator=g)
        return p.div_(q).argmax(-1)

    times = {}
    for name, call in (
        ("ours", ours(0, 1.0)),
        ("ours_top_k_p", ours(50, 0.9)),
        ("stock", stock),
    ):
        found = []
        for _ in range(12):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            call()
            b.record()
            b.synchronize()
            found.append(a.elapsed_time(b) * 1e3)
        times[name] = statistics.median(found[2:])
    row(f"draw, {rows} rows of 151936, eager", **times)


def sampling() -> None:
    for rows in (1, 128):
        _draw(rows)


def ceilings() -> None:
    """What a large copy and a large product reach on this chip now."""
    found = gpu_linear.ceilings()
    row("ceilings", **found)


PARTS = {f.__name__: f for f in (ceilings, products, norms, softmaxes, experts, sampling,
                                 attentions)}  # fmt: skip


def main() -> None:
    for part in (PARTS[name] for name in sys.argv[2:] or PARTS):
        try:
            part()
        except Exception as fault:
            print(part.__name__, "stopped:", repr(fault)[:400], flush=True)
        with open(sys.argv[1], "w") as file:
            json.dump(report, file)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
