"""Mixture of experts: grouped matrix products over rows sorted by expert, and the sum of slots.

Order of accumulation: as `linear` with split 1 for every (row, expert) product, in float32, times
the routing weight in float32 where asked, one rounding; then the k slots of a token are added in
slot order in float32, one rounding. Which rows share a tile, and the tile, change nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton.linear import Tile


@triton.jit(do_not_specialize=["pairs"])
def _grouped_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, row_ptr, expert_ptr, used_ptr, pairs, N, K, stride_x, stride_we,
    stride_wn, SLOTS: tl.constexpr, SCALE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile: rows row_ptr[block] (pair = token · k + slot; `pairs` marks padding) of one expert.
    x has one row per SLOTS pairs; y one per pair."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    if block * BLOCK_M < tl.load(used_ptr):
        rn = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        rk = tl.arange(0, BLOCK_K)
        pair = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        expert = tl.load(expert_ptr + block).to(tl.int64)
        real = (pair < pairs)[:, None]
        x_tile = x_ptr + ((pair // SLOTS) * stride_x)[:, None] + rk[None, :]
        w_tile = w_ptr + expert * stride_we + (rn.to(tl.int64) * stride_wn)[None, :] + rk[:, None]
        columns = (rn < N)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            if EVEN_K:
                x = tl.load(x_tile + k, mask=real, other=0.0)
                w = tl.load(w_tile + k, mask=columns, other=0.0)
            else:
                x = tl.load(x_tile + k, mask=real & (rk < K - k)[None, :], other=0.0)
                w = tl.load(w_tile + k, mask=columns & (rk < K - k)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if SCALE:
            acc *= tl.load(scale_ptr + pair, mask=pair < pairs, other=0.0)[:, None]
        y_tile = y_ptr + (pair * N)[:, None] + rn[None, :]
        tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=real & columns)


@triton.jit
def _sum_slots_kernel(x_ptr, y_ptr, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = ((x[t, 0] + x[t, 1]) + x[t, 2]) + …; x [rows, SLOTS, N], y [rows, N], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * SLOTS * N + column
    total = tl.load(at, mask=column < N, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, SLOTS):
        total += tl.load(at + slot * N, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, total.to(y_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """y = round(silu(gate)) · up, elementwise; x [rows, 2 N] = gate | up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate = tl.load(x_ptr + row * 2 * N + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + column, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * N + column, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)


def sort_by_expert(
    topk_ids: torch.Tensor, experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs sorted by expert, each expert padded to whole blocks: (pair of each row, expert of each
    block, rows used [1]). All int32, sizes follow from topk_ids' shape alone; no host sync."""
    flat = topk_ids.reshape(-1).long()
    pairs = flat.numel()
    one_hot = flat[:, None] == torch.arange(experts, device=flat.device)
    counts = one_hot.sum(0)
    ends = torch.cumsum((counts + block_m - 1) // block_m * block_m, 0)
    starts = ends - (counts + block_m - 1) // block_m * block_m
    order = torch.argsort(flat, stable=True)
    first = torch.cumsum(counts, 0) - counts
    sorted_experts = flat[order]
    place = torch.arange(pairs, device=flat.device) - first[sorted_experts] + starts[sorted_experts]
    most = (pairs + min(pairs, experts) * (block_m - 1) + block_m - 1) // block_m * block_m
    rows = torch.full((most,), pairs, dtype=torch.int32, device=flat.device)
    rows[place] = order.to(torch.int32)
    blocks = torch.arange(0, most, block_m, device=flat.device)
    owner = torch.searchsorted(ends, blocks, right=True).clamp(max=experts - 1)
    return rows, owner.to(torch.int32), ends[-1:].to(torch.int32)


def _grouped(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, slots: int, pairs: int,
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tile: Tile,
) -> torch.Tensor:  # fmt: skip
    rows, owner, used = plan
    columns, depth = w.shape[1:]
    y = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    _grouped_kernel[(owner.numel() * triton.cdiv(columns, tile.block_n),)](
        x, w, y, scale, rows, owner, used, pairs, columns, depth, x.stride(0), w.stride(0),
        w.stride(1), SLOTS=slots, SCALE=scale is not None, EVEN_K=depth % tile.block_k == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y


def sum_slots(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, k, H] contiguous → [M, H], slots added in order in float32, one rounding."""
    rows, slots, columns = x.shape
    y = x.new_empty((rows, columns)) if out is None else out
    if rows:
        _sum_slots_kernel[(rows, triton.cdiv(columns, 1024))](x, y, columns,
                                                             SLOTS=slots, BLOCK=1024)  # fmt: skip
    return y


def moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    tile: Tile,
) -> torch.Tensor:
    """x [M, H], w13 [E, 2 I, H], w2 [E, H, I], weights and ids [M, k] → [M, H]; silu(gate) · up.

    Σ over slots s, in order, of weight[m, s] · w2[e] (silu(gate) · up); weights in float32.
    """
    rows, slots = topk_ids.shape
    pairs = rows * slots
    if not rows:
        return torch.empty_like(x)
    plan = sort_by_expert(topk_ids, w13.shape[0], tile.block_m)
    both = _grouped(x, w13, None, slots, pairs, plan, tile)
    inner = w2.shape[2]
    act = both.new_empty((pairs, inner))
    _silu_mul_kernel[(pairs, triton.cdiv(inner, 1024))](both, act, inner, BLOCK=1024)
    scale = topk_weights.reshape(-1).float().contiguous()
    out = _grouped(act, w2, scale, 1, pairs, plan, tile)
    return sum_slots(out.view(rows, slots, -1))
