"""Batched matrix product of any strides: the net under whatever does not go through `linear`.

Order of accumulation of c[b, m, n]: one ascending chain of 16 consecutive k in float32, as in
`linear` with split 1, whatever the tile, the batch or the row. One rounding at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton.linear import Tile


@triton.jit(do_not_specialize=["M"])
def _bmm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one batch: a [B, M, K] · b [B, K, N] → c [B, M, N] contiguous."""
    batch = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rm = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K).to(tl.int64)
    a_tile = a_ptr + batch * stride_ab + (rm.to(tl.int64) * stride_am)[:, None]
    b_tile = b_ptr + batch * stride_bb + (rn.to(tl.int64) * stride_bn)[None, :]
    a_tile += rk[None, :] * stride_ak
    b_tile += rk[:, None] * stride_bk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = rk < K - k
        a = tl.load(a_tile, mask=(rm < M)[:, None] & left[None, :], other=0.0)
        b = tl.load(b_tile, mask=left[:, None] & (rn < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    c_tile = c_ptr + batch * M * N + (rm.to(tl.int64) * N)[:, None] + rn[None, :]
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(c_tile, acc.to(c_ptr.dtype.element_ty), mask=mask)


def bmm(a: torch.Tensor, b: torch.Tensor, *, tile: Tile) -> torch.Tensor:
    """a [B, M, K] · b [B, K, N] → [B, M, N], one dtype, any strides; `tile` never changes bits."""
    batches, rows, depth = a.shape
    columns = b.shape[2]
    if b.shape[:2] != (batches, depth) or a.dtype != b.dtype:
        raise ValueError(f"bmm: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
    c = torch.empty((batches, rows, columns), dtype=a.dtype, device=a.device)
    if c.numel():
        grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n), batches)
        _bmm_kernel[grid](
            a, b, c, rows, columns, depth, *a.stride(), *b.stride(),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return c
