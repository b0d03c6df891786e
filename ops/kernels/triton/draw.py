"""The seeded draw on CUDA and Ascend: token ids equal to those of ops/sampling.py.

Three launches. `_peaks`: the largest logit of every 128 tokens. `_draw`: each program takes a part
of a row and keeps its best (score, token); a block is skipped where its largest possible score is
below a score that the row already has. `_finish`: the best part of each row. Rows with filters take
one launch more (draw_filter.py). A row's result does not depend on how it is cut into parts: scores
are compared, never added, and ties go to the lowest token id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from ops.kernels.triton import draw_filter
from ops.kernels.triton.draw_steps import MAX_NOISE, MIN_NOISE, cleaned, gumbel, philox, shifted

if TYPE_CHECKING:
    from ops.sampling import Rows

GROUP = 128  # tokens under one peak


@triton.jit
def _peaks_kernel(x_ptr, peak_ptr, V, groups, stride_x, GROUP: tl.constexpr, TILE: tl.constexpr):
    """peak[row, g] = largest of x[row, GROUP * g ...], NaN left out. TILE groups a program."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * stride_x + at, mask=at < V, other=float("-inf"))
    tl.store(peak_ptr + row * groups + g, tl.max(cleaned(x), axis=1), mask=g < groups)


@triton.jit
def _draw_kernel(
    x_ptr, peak_ptr, best_ptr, stream_ptr, edge_ptr, score_ptr, id_ptr,
    V, groups, blocks, parts, stride_x,
    GROUPS: tl.constexpr, COVER: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
    FILTERED: tl.constexpr,
):  # fmt: skip
    """Part program_id(1) of row program_id(0). A block is 4 * LANES tokens, which are LANES Philox
    blocks and lie under COVER peaks."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    g = tl.arange(0, GROUPS)
    peaks = tl.load(peak_ptr + row * groups + g, mask=g < groups, other=float("-inf"))
    best = tl.max(peaks, axis=0)
    s = stream_ptr + row * 8
    inv_t = tl.load(s + 4).to(tl.float32, bitcast=True)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    k0, k1 = tl.load(s).to(tl.uint32) + zero, tl.load(s + 1).to(tl.uint32) + zero
    choice, position = tl.load(s + 2).to(tl.uint32) + zero, tl.load(s + 3).to(tl.uint32) + zero
    if FILTERED:
        edge = tl.load(edge_ptr + row * 3)
        edge_id = tl.load(edge_ptr + row * 3 + 1).to(tl.int32, bitcast=True)
        low = tl.load(edge_ptr + row * 3 + 2)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    top_id = tl.full((LANES,), 0x7FFFFFFF, tl.int32)
    greedy = inv_t == 0.0
    reached = tl.where(greedy, float("-inf"), MIN_NOISE)  # the row's best token has t = 0
    for block in range(part, blocks, parts):
        c0 = block * LANES + lane
        first = (c0 >> 4) * 64 + (c0 & 15)
        over = block * COVER + tl.arange(0, COVER)
        ceiling = tl.max(
            tl.load(peak_ptr + row * groups + over, mask=over < groups, other=float("-inf")), axis=0
        )
        ceiling_t = shifted(ceiling, best) * inv_t
        if greedy:
            possible = ceiling == best
        else:
            possible = ceiling_t + MAX_NOISE >= reached
            if FILTERED:
                possible = possible & (ceiling >= edge)
        if possible:
            if greedy:
                w0, w1, w2, w3 = zero, zero, zero, zero
            else:
                w0, w1, w2, w3 = philox(c0.to(tl.uint32), position, choice, zero + 1, k0, k1, SPLIT)
            for j in tl.static_range(4):
                w = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))
                at = first + 16 * j
                x = tl.load(x_ptr + row * stride_x + at, mask=at < V, other=float("-inf"))
                x = cleaned(x)
                t = shifted(x, best) * inv_t
                score = tl.where(greedy, x, t + gumbel(w))
                score = tl.where(x == float("-inf"), float("-inf"), score)
                if FILTERED:
                    keep = ((x > edge) | ((x == edge) & (at <= edge_id))) & (t >= low)
                    score = tl.where(keep, score, float("-inf"))
                better = (score > top) | ((score == top) & (at < top_id))
                top_id = tl.where(better & (at < V), at, top_id)
                top = tl.where(better, score, top)
            reached = tl.maximum(reached, tl.max(top, axis=0))
    score = tl.max(top, axis=0)
    tl.store(score_ptr + row * parts + part, score)
    tl.store(
        id_ptr + row * parts + part, tl.min(tl.where(top == score, top_id, 0x7FFFFFFF), axis=0)
    )
    tl.store(best_ptr + row, best)


@triton.jit
def _finish_kernel(score_ptr, id_ptr, best_ptr, out_ptr, parts, PARTS: tl.constexpr):
    """The first token with the largest score of each row; token 0 where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    score = tl.load(score_ptr + row * parts + p, mask=p < parts, other=float("-inf"))
    at = tl.load(id_ptr + row * parts + p, mask=p < parts, other=0x7FFFFFFF)
    at = tl.min(tl.where(score == tl.max(score, axis=0), at, 0x7FFFFFFF), axis=0)
    none = tl.load(best_ptr + row) == float("-inf")
    tl.store(out_ptr + row, tl.where(none, 0, at).to(tl.int64))


def draw(
    logits: torch.Tensor, opts: Rows, *, lanes: int = 512, programs: int = 1024, split: bool = False
) -> torch.Tensor:
    """float32 [N, V] with unit stride along V, not changed -> int64 [N]; `opts` of `ops.sampling`.

    `lanes` (a power of 2, at least 32), `programs` and `split` (16-bit multiplications) change
    speed alone.
    """
    n, vocab = logits.shape
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    groups, blocks = triton.cdiv(vocab, GROUP), triton.cdiv(vocab, 4 * lanes)
    parts = max(1, min(blocks, programs // max(n, 1), 64))
    peak = torch.empty((n, groups), dtype=torch.float32, device=x.device)
    best, score = peak.new_empty(n), peak.new_empty((n, parts))
    ids = torch.empty((n, parts), dtype=torch.int32, device=x.device)
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    stream = _host(opts, vocab).to(x.device, non_blocking=True)
    exact = {"enable_fp_fusion": False} if x.device.type == "cuda" else {}
    tile = 16
    _peaks_kernel[(n, triton.cdiv(groups, tile))](
        x, peak, vocab, groups, x.stride(0), GROUP=GROUP, TILE=tile, **exact
    )
    filtered = bool(opts.filtered.any())
    edge = draw_filter.edges(x, peak, stream, GROUP, exact) if filtered else peak
    _draw_kernel[(n, parts)](
        x, peak, best, stream, edge, score, ids, vocab, groups, blocks, parts, x.stride(0),
        GROUPS=triton.next_power_of_2(groups), COVER=4 * lanes // GROUP, LANES=lanes,
        SPLIT=split, FILTERED=filtered, **exact,
    )  # fmt: skip
    _finish_kernel[(n,)](score, ids, best, out, parts, PARTS=triton.next_power_of_2(parts), **exact)
    return out


def _host(opts: Rows, vocab: int) -> torch.Tensor:
    """int32 [N, 8], one copy to the device: seed low and high, choice, position, 1 / T (bits),
    top_k (0: off), top_p, lowest t (bits)."""
    out = torch.empty((opts.seed.shape[0], 8), dtype=torch.int32)
    a = out.numpy()
    a[:, :2] = np.ascontiguousarray(opts.seed).view(np.int32).reshape(-1, 2)
    a[:, 2] = opts.choice.astype(np.uint32).view(np.int32)
    a[:, 3] = opts.position.astype(np.uint32).view(np.int32)
    a[:, 4] = np.ascontiguousarray(opts.inv_t).view(np.int32)
    a[:, 5] = np.where(opts.top_k < vocab, opts.top_k, 0)
    a[:, 6] = opts.top_p
    a[:, 7] = draw_filter.lowest(opts).view(np.int32)
    return out
