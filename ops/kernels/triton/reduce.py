"""sum and mean over the last dimension in float32.

Order: lane j of a block adds x[j], x[j + block], x[j + 2·block], … ascending; the lanes are then
added in one tree. The block follows from the length of the row alone; one program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton.rows import aligned, alignment

BLOCK = 1024


@triton.jit(do_not_specialize=["stride_x"])
def _sum_kernel(
    x_ptr, y_ptr, N, stride_x, divisor, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """y[row] = (sum of x[row]) / divisor."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        at = start + lane
        x = tl.load(x_ptr + row * tl.multiple_of(stride_x, ALIGN) + at, mask=at < N, other=0.0)
        acc += x.to(tl.float32)
    total = tl.sum(acc, axis=0) / divisor
    tl.store(y_ptr + row, total.to(y_ptr.dtype.element_ty))


def _rows(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, list[int]]:
    """x with `dims` moved last and flattened to [rows, length], and the shape of what is kept."""
    kept = [d for d in range(x.ndim) if d not in dims]
    length = 1
    for d in dims:
        length *= x.shape[d]
    flat = x.permute(*kept, *dims).reshape(-1, length)
    return flat, [x.shape[d] for d in kept]


def sum_dims(
    x: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype, mean: bool = False
) -> torch.Tensor:
    """Sum (or mean) of x over `dims` (all when empty) in float32, rounded once to `dtype`."""
    chosen = sorted({d % x.ndim for d in dims}) if dims else list(range(x.ndim))
    flat, kept = _rows(x, chosen) if x.ndim else (x.reshape(1, 1), [])
    flat = aligned(flat)
    rows, length = flat.shape
    y = torch.empty((rows,), dtype=dtype, device=x.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(max(length, 1)))
        divisor = float(length) if mean else 1.0
        _sum_kernel[(rows,)](flat, y, length, flat.stride(0), divisor, BLOCK=block,
                             ALIGN=alignment(length), num_warps=4)  # fmt: skip
    shape = [1 if d in chosen else x.shape[d] for d in range(x.ndim)] if keepdim else kept
    return y.view(shape)
