"""Matrix product y = x Wᵀ + b whose bits depend on one row of x and on W alone.

Order of accumulation of y[m, n], the same in every tile shape:
  1. K is cut into `split` segments of whole multiples of 512 k; `split` belongs to (N, K), never
     to M, and no tile moves a boundary.
  2. Inside a segment the products are added in float32 by one ascending chain of matrix
     instructions of 16 consecutive k (tensor cores; a cube of 16 on Ascend). A tile of 16 rows and
     one of 256 issue the same chain, so tiles may be chosen by M.
  3. Segments are added in ascending order in float32, then the bias, then one rounding to y's type.
Nothing is added by an atomic. `split` = 1 is a single chain, the order that cuBLASLt's unsplit
kernels use too (tests/gpu compares the bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GRANULE = 512  # k; segments of a split K are whole multiples of it


@dataclass(frozen=True)
class Tile:
    """Shape and schedule of one launch. None of it may change bits; `split` lives with (N, K)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, segment_k, stride_xm, stride_wn, stride_ym, stride_ys,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile. x [M, K], w [N, K], unit stride along K; y [M, N] or, with PART,
    float32 partial sums [SPLIT, M, N], one segment per program of grid axis 1."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    first = group * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    within = pid - group * GROUP_M * tiles_n
    rm = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = (within // size) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + (rm.to(tl.int64) * stride_xm)[:, None] + rk[None, :]
    w_tile = w_ptr + (rn.to(tl.int64) * stride_wn)[None, :] + rk[:, None]
    x_rows = (rm < M)[:, None]
    w_rows = (rn < N)[None, :]
    steps = tl.cdiv(segment_k, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = tl.program_id(1) if PART else 0
    end = begin + 1 if PART else SPLIT
    for segment in range(begin, end):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            k = segment * segment_k + step * BLOCK_K
            if EVEN_K:
                x = tl.load(x_tile + k, mask=x_rows, other=0.0)
                w = tl.load(w_tile + k, mask=w_rows, other=0.0)
            else:
                left = K - k
                x = tl.load(x_tile + k, mask=x_rows & (rk < left)[None, :], other=0.0)
                w = tl.load(w_tile + k, mask=w_rows & (rk < left)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if PART or SPLIT == 1:
            total = acc
        else:
            total += acc
    y_tile = y_ptr + (rm.to(tl.int64) * stride_ym)[:, None] + rn[None, :]
    if PART:
        y_tile += begin.to(tl.int64) * stride_ys
    elif HAS_BIAS:
        total += tl.load(b_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=x_rows & w_rows)


@triton.jit(do_not_specialize=["M"])
def _add_segments_kernel(
    p_ptr, b_ptr, y_ptr, M, N, stride_ps,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = ((p0 + p1) + p2) + … + bias, elementwise over a contiguous [M, N]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < M.to(tl.int64) * N
    total = tl.load(p_ptr + at, mask=mask, other=0.0)
    for segment in tl.static_range(1, SPLIT):
        total += tl.load(p_ptr + segment * stride_ps + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(b_ptr + at % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile,
    split: int = 1,
    two_pass: bool = False,
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ + bias [N] → [M, N] in x's dtype; float32 accumulation.

    `split` must be the same for every M of one (N, K); then `tile` and `two_pass` (segments in
    parallel, added by a second kernel) are free: they change speed, never bits. Both operands need
    unit stride along K. Raises ValueError for shapes or strides that the kernel does not take.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    if weight.shape[1] != depth or x.dtype != weight.dtype:
        raise ValueError(f"linear: x {x.dtype} [{rows}, {depth}] against weight {weight.dtype} "
                         f"{list(weight.shape)}; both need one dtype and one K")  # fmt: skip
    if (x.stride(1) != 1 and depth > 1) or (weight.stride(1) != 1 and depth > 1):
        raise ValueError("linear: x and weight need unit stride along K; call .contiguous() first")
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    if split > 1 and GRANULE % tile.block_k:
        raise ValueError(f"linear: block_k {tile.block_k} must divide {GRANULE} when K is split")
    segment = depth if split == 1 else triton.cdiv(triton.cdiv(depth, split), GRANULE) * GRANULE
    part = two_pass and split > 1
    out = y.new_empty((split, rows, columns), dtype=torch.float32) if part else y
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),
            split if part else 1)  # fmt: skip
    _linear_kernel[grid](
        x, weight, bias, out, rows, columns, depth, segment,
        x.stride(0), weight.stride(0), columns, rows * columns,
        HAS_BIAS=bias is not None, SPLIT=split, PART=part,
        EVEN_K=depth % (tile.block_k if split == 1 else segment * split) == 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        PRECISION="ieee", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if part:
        block = 1024
        _add_segments_kernel[(triton.cdiv(rows * columns, block),)](
            out, bias, y, rows, columns, rows * columns,
            HAS_BIAS=bias is not None, SPLIT=split, BLOCK=block,
        )  # fmt: skip
    return y
