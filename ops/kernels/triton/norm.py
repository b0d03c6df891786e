"""RMSNorm and the fused add before it, one row of the batch per program row.

y = round(x · rsqrt(mean(x²) + eps)) · weight, both roundings to x's dtype (as the models were
trained); mean and rsqrt in float32. Gemma's form is x · rsqrt(…) · (weight + 1), rounded once.
With a residual r: s = x + r in float32, the new residual is round(s), and s, unrounded, is what is
normalised.
Order of the sum of squares: one tree over the whole row in a block of the next power of two; tree,
block, and rows per program follow from the width alone, never from the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton.rows import aligned, alignment

MOST_COLUMNS = 32768


@triton.jit(do_not_specialize=["rows", "inner", "stride_outer", "stride_inner", "stride_r"])
def _rms_norm_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, rows, inner, stride_outer, stride_inner, stride_r, eps,
    N: tl.constexpr, GEMMA: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x, by its strides [rows / inner, inner, N]; y, s contiguous [rows, N]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < N)[None, :]
    outer = (row // inner) * tl.multiple_of(stride_outer, ALIGN)
    at = outer + (row % inner) * tl.multiple_of(stride_inner, ALIGN)
    x = tl.load(x_ptr + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    out = row[:, None] * N + column[None, :]
    if HAS_RESIDUAL:
        r_at = row * tl.multiple_of(stride_r, ALIGN)
        r = tl.load(r_ptr + r_at[:, None] + column[None, :], mask=inside, other=0.0)
        x += r.to(tl.float32)
        tl.store(s_ptr + out, x.to(s_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    w = tl.load(w_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    normal = x * scale[:, None]
    if GEMMA:
        w += 1.0
    else:
        normal = normal.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + out, (normal * w[None, :]).to(y_ptr.dtype.element_ty), mask=inside)


def schedule(columns: int) -> tuple[int, int, int]:
    """(block, rows per program, warps) for a width; part of the definition of the sum's order."""
    block = triton.next_power_of_2(columns)
    if block > MOST_COLUMNS:
        raise ValueError(f"rms_norm: {columns} columns; at most {MOST_COLUMNS} in one block")
    if block <= 256:
        return block, 1024 // block, 4
    return block, 1, max(1, min(16, block // 512))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    gemma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [..., N], weight [N], residual like x → (y, new residual or None), contiguous, x's dtype.

    x may be a strided view of up to three dimensions (a slice of q, k, v). Raises ValueError for
    rows wider than one block.
    """
    columns = x.shape[-1]
    plain = x.ndim == 2 or (x.ndim == 3 and residual is None)
    view = aligned(x if plain else x.reshape(-1, columns))
    inner = view.shape[1] if view.ndim == 3 else 1
    rows = view.shape[0] * inner
    block, per_program, warps = schedule(columns)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y, added
    old = None if residual is None else aligned(residual.reshape(-1, columns))
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        view, old, weight, y, added, rows, inner, view.stride(0),
        view.stride(1) if view.ndim == 3 else 0, 0 if old is None else old.stride(0), eps,
        N=columns, GEMMA=gemma, HAS_RESIDUAL=old is not None, BLOCK=block,
        ROWS=per_program, ALIGN=alignment(columns), num_warps=warps,
    )  # fmt: skip
    return y, added
