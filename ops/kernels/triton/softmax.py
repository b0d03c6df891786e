"""softmax and log_softmax over the last dimension, float32, any width.

Order: each row is cut at fixed multiples of CHUNK columns. Within a chunk: its maximum (exact), and
one tree of exp(x - maximum). Across chunks, in one vector: the maximum, then one tree of
partial · exp(chunk maximum - maximum). Chunk and trees follow from the width alone, so a row's
bits do not depend on the other rows, and one row of a wide vocabulary still fills the chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton.rows import aligned, alignment

CHUNK = 4096


@triton.jit(do_not_specialize=["stride_x"])
def _chunk_kernel(
    x_ptr, m_ptr, l_ptr, N, stride_x, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of one chunk of one row → [rows, CHUNKS]."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // CHUNKS
    chunk = pid % CHUNKS
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + row * tl.multiple_of(stride_x, ALIGN) + column, mask=column < N, other=float("-inf")
    )
    x = x.to(tl.float32)
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(m_ptr + pid, top)
    tl.store(l_ptr + pid, tl.sum(tl.exp(x - base), axis=0))


@triton.jit(do_not_specialize=["stride_x"])
def _finish_kernel(
    x_ptr, m_ptr, l_ptr, y_ptr, N, stride_x, LOG: tl.constexpr, CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Join a row's chunks and write one of them; y contiguous [rows, N]."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // CHUNKS
    chunk = pid % CHUNKS
    at = tl.arange(0, WIDTH)
    m = tl.load(m_ptr + row * CHUNKS + at, mask=at < CHUNKS, other=float("-inf"))
    part = tl.load(l_ptr + row * CHUNKS + at, mask=at < CHUNKS, other=0.0)
    top = tl.max(m, axis=0)
    total = tl.sum(part * tl.exp(tl.where(m == float("-inf"), float("-inf"), m - top)), axis=0)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + row * tl.multiple_of(stride_x, ALIGN) + column, mask=column < N, other=float("-inf")
    )
    x = x.to(tl.float32) - top
    y = x - tl.log(total) if LOG else tl.exp(x) / total
    tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=column < N)


def _run(x: torch.Tensor, log: bool, dtype: torch.dtype) -> torch.Tensor:
    x = aligned(x.reshape(-1, x.shape[-1]))
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if rows == 0 or columns == 0:
        return y
    block = min(CHUNK, triton.next_power_of_2(columns))
    chunks = triton.cdiv(columns, block)
    stats = torch.empty((2, rows, chunks), dtype=torch.float32, device=x.device)
    grid = (rows * chunks,)
    warps = 8 if block == CHUNK else 4
    _chunk_kernel[grid](
        x, stats[0], stats[1], columns, x.stride(0),
        CHUNKS=chunks, BLOCK=block, ALIGN=alignment(columns), num_warps=warps,
    )  # fmt: skip
    _finish_kernel[grid](
        x, stats[0], stats[1], y, columns, x.stride(0), LOG=log, CHUNKS=chunks,
        WIDTH=triton.next_power_of_2(chunks), BLOCK=block, ALIGN=alignment(columns),
        num_warps=warps,
    )  # fmt: skip
    return y


def softmax(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., V] → probabilities, same shape, computed in float32, rounded once to `dtype`."""
    return _run(x, False, dtype).view(x.shape)


def log_softmax(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., V] → log-probabilities, same shape, computed in float32, rounded once to `dtype`."""
    return _run(x, True, dtype).view(x.shape)
