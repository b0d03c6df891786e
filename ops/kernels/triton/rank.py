"""The place of one token of each row in the order: value from high to low, id from low to high.

Counts of comparisons, integers, so no order of addition matters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 8192


@triton.jit
def _rank_kernel(
    x_ptr, token_ptr, count_ptr, V, stride_x, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """count[row, chunk] = tokens of the chunk that come before, or are, the row's token."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // CHUNKS
    at = (pid % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row)
    mine = tl.load(x_ptr + row * stride_x + token)
    x = tl.load(x_ptr + row * stride_x + at, mask=at < V, other=float("-inf"))
    before = (x > mine) | ((x == mine) & (at <= token))
    tl.store(count_ptr + pid, tl.sum((before & (at < V)).to(tl.int32), axis=0))


def rank(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """x float32 [N, V] with unit stride along V, tokens int64 [N] → int64 [N], from 1."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    counts = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    if rows:
        _rank_kernel[(rows * chunks,)](x, tokens, counts, vocab, x.stride(0),
                                       CHUNKS=chunks, BLOCK=CHUNK, num_warps=8)  # fmt: skip
    return counts.sum(-1)
