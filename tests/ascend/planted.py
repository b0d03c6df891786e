"""A kernel as it must not be: K in pieces, added by atomics. The offline check has to see it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_k(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One piece of K per program of the second axis."""
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    rk = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=(rm < M)[:, None], other=0.0)
    b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=(rn < N)[None, :], other=0.0)
    part = tl.dot(a, b)
    tl.atomic_add(c_ptr + rm[:, None] * N + rn[None, :], part, mask=(rm < M)[:, None])
