"""Log-softmax of a row of logits, whole or for one token with its place, in Triton.

Order: each row is cut at fixed multiples of CHUNK columns; a chunk gives its maximum (exact) and
one tree of exp(x - maximum); the chunks are joined from the first to the last, one multiplication
and one addition each. A logprob is (x - maximum) - log(total), two roundings. All of it follows
from the width of the row alone, and both forms join the chunks by the same function with
contraction off, so a token's logprob is the same whatever else was asked for.

A place is a count of comparisons, integers: logprob from high to low, id from low to high.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.kernels.triton import direct
from ops.kernels.triton.rows import aligned, alignment

CHUNK = 8192


@triton.jit(do_not_specialize=["stride_x"])
def _chunk_kernel(
    x_ptr, m_ptr, l_ptr, V, stride_x, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of one chunk of one row -> [rows, CHUNKS]."""
    pid = tl.program_id(0).to(tl.int64)
    at = (pid % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    row = x_ptr + (pid // CHUNKS) * tl.multiple_of(stride_x, ALIGN)
    x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(m_ptr + pid, top)
    tl.store(l_ptr + pid, tl.sum(tl.exp(x - base), axis=0))


@triton.jit
def _join(m_ptr, l_ptr, row, CHUNKS: tl.constexpr):
    """(maximum, log of the sum of exponentials around it) of a row, from its chunks in order."""
    top = tl.load(m_ptr + row * CHUNKS)
    for c in tl.static_range(1, CHUNKS):
        top = tl.maximum(top, tl.load(m_ptr + row * CHUNKS + c))
    total = top * 0.0
    for c in tl.static_range(CHUNKS):
        m = tl.load(m_ptr + row * CHUNKS + c)
        part = tl.load(l_ptr + row * CHUNKS + c)
        total += tl.where(m == float("-inf"), 0.0, part * tl.exp(m - top))
    return top, tl.log(total)


@triton.jit(do_not_specialize=["stride_x"])
def _whole_kernel(
    x_ptr, m_ptr, l_ptr, y_ptr, V, stride_x, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """One chunk of a row's logprobs; y contiguous float32 [rows, V]."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // CHUNKS
    top, log_total = _join(m_ptr, l_ptr, row, CHUNKS)
    at = (pid % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    x = tl.load(x_ptr + row * tl.multiple_of(stride_x, ALIGN) + at, mask=inside, other=0.0)
    tl.store(y_ptr + row * V + at, (x.to(tl.float32) - top) - log_total, mask=inside)


@triton.jit(do_not_specialize=["stride_x"])
def _token_kernel(
    x_ptr, m_ptr, l_ptr, token_ptr, out_ptr, place_ptr, V, stride_x,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The logprob of the row's token; to its place is added how many tokens of a chunk come before
    it or are it, integers, in whatever order.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // CHUNKS
    top, log_total = _join(m_ptr, l_ptr, row, CHUNKS)
    x_ptr += row * tl.multiple_of(stride_x, ALIGN)
    token = tl.load(token_ptr + row)
    mine = (tl.load(x_ptr + token).to(tl.float32) - top) - log_total
    at = (pid % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = (x - top) - log_total
    before = inside & ((y > mine) | ((y == mine) & (at <= token)))
    tl.atomic_add(place_ptr + row, tl.sum(before.to(tl.int32), axis=0).to(tl.int64))
    tl.store(out_ptr + row, mine, mask=pid % CHUNKS == 0)


def _chunks(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    rows, vocab = x.shape
    block = min(CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, block)
    stats = torch.empty((2, rows, chunks), dtype=torch.float32, device=x.device)
    align = alignment(vocab)
    meta = {"CHUNKS": chunks, "BLOCK": block, "ALIGN": align, "num_warps": 8}
    key = (vocab, *direct.place(x, stats[1]))
    args = (x, stats[0], stats[1], vocab, x.stride(0))
    direct.launch(_chunk_kernel, (rows * chunks, 1, 1), args, meta, key)
    return stats, chunks, block, align


def _exact(x: torch.Tensor) -> dict[str, bool]:
    return {"enable_fp_fusion": False} if x.device.type == "cuda" else {}


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float [N, V] -> float32 [N, V]."""
    x = aligned(logits)
    rows, vocab = x.shape
    y = torch.empty((rows, vocab), dtype=torch.float32, device=x.device)
    if rows and vocab:
        stats, chunks, block, align = _chunks(x)
        _whole_kernel[(rows * chunks,)](
            x, stats[0], stats[1], y, vocab, x.stride(0), CHUNKS=chunks, BLOCK=block, ALIGN=align,
            num_warps=8, **_exact(x),
        )  # fmt: skip
    return y


def of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob float32 [N], place from 1 int64 [N]) of one token of each row.

    logits float [N, V], tokens int64 [N]. Bit for bit what `log_softmax` says of them.
    """
    x = aligned(logits)
    rows, vocab = x.shape
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    place = torch.zeros(rows, dtype=torch.int64, device=x.device)
    if rows:
        stats, chunks, block, align = _chunks(x)
        direct.launch(
            _token_kernel, (rows * chunks, 1, 1),
            (x, stats[0], stats[1], tokens, out, place, vocab, x.stride(0)),
            {"CHUNKS": chunks, "BLOCK": block, "ALIGN": align, "num_warps": 8, **_exact(x)},
            (vocab, *direct.place(x, stats[1], tokens)),
        )  # fmt: skip
    return out, place
