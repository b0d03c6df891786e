"""Attention over a paged KV cache: one definition for prefill, chunked prefill and decode.

For a query at absolute position p, keys 0 … p (fewer with a window) are cut at absolute positions:
segments of `segment` keys, tiles of TILE keys inside. In a segment, tiles ascend: scores by a chain
of 16 head dimensions, a running maximum m, acc = acc · 2^(m_old - m) + P·V and z likewise, both by
ascending chains of 16 keys (z is P·1 on the matrix unit, so no lane layout decides its order).
Segments are joined in ascending order by `_join`, in the kernel or in a second one: the same fused
multiply-adds on the same numbers. A tile that is masked for a row leaves its m, z, acc as they
were, so it does not matter which rows share a program, nor whether segments run in parallel: a
position's bits depend on its own query, keys and values alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 64  # keys; part of the definition


@dataclass(frozen=True)
class Schedule:
    """Rows of a program (tokens × heads of one KV head), warps and stages: speed only."""

    block_m: int = 64
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def _join(m, z, acc, m_new, z_new, acc_new):
    """Append a segment to what is joined so far. m, z [R]; acc [R, D]; base-2 exponents."""
    top = tl.maximum(m, m_new)
    base = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(m - base)
    new = tl.exp2(m_new - base)
    return top, tl.fma(z, old, z_new * new), tl.fma(acc, old[:, None], acc_new * new[:, None])


@triton.jit
def _find_sequence(start_ptr, sequences, block, BLOCK_Q: tl.constexpr):
    """The sequence that holds query block `block`; s begins at block start[s] // BLOCK_Q + s."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(start_ptr + middle) // BLOCK_Q + middle
        low = tl.where(first <= block, middle, low)
        high = tl.where(first <= block, high, middle)
    return low


@triton.jit(do_not_specialize=["sequences", "stride_t", "part_rows"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, z_ptr, table_ptr, start_ptr, length_ptr, slope_ptr, sink_ptr,
    sequences, scale, softcap, stride_qt, stride_qh, stride_ot, stride_oh, stride_kb, stride_ks,
    stride_kh, stride_vb, stride_vs, stride_vh, stride_t, part_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """BLOCK_M / GROUP_PAD tokens of one sequence × the GROUP query heads of KV head program 1.
    q [T, Hq, D]; caches [pages, PAGE, Hk, D] by strides; o [T, Hq, D], or with PART one segment
    (program 2): o [S, T, Hq, D] float32 and m, z [S, T, Hq], where S is the grid's third size."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(start_ptr, sequences, block, BLOCK_Q)
    begin = tl.load(start_ptr + sequence)
    queries = tl.load(start_ptr + sequence + 1) - begin
    first = (block - (begin // BLOCK_Q + sequence)) * BLOCK_Q
    if first < queries:
        length = tl.load(length_ptr + sequence)
        row = tl.arange(0, BLOCK_M)
        token = first + row // GROUP_PAD
        within = row % GROUP_PAD
        head = kv_head * GROUP + within
        real = (token < queries) & (within < GROUP)
        position = length - queries + token
        last = length - queries + tl.minimum(first + BLOCK_Q, queries) - 1
        d = tl.arange(0, D_PAD)
        at = ((begin + token).to(tl.int64) * stride_qt + head * stride_qh)[:, None] + d[None, :]
        q = tl.load(q_ptr + at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        if ALIBI:
            slope = tl.load(slope_ptr + head, mask=real, other=0.0) * 1.4426950408889634
        m_all = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        z_all = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc_all = tl.zeros((BLOCK_M, D_PAD), dtype=tl.float32)
        ones = tl.full((TILE, 16), 1.0, dtype=q.dtype)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(length - queries + first - WINDOW + 1, 0)
        segments = last // SEGMENT + 1
        s_begin = tl.program_id(2) if PART else lowest // SEGMENT
        s_end = tl.minimum(s_begin + 1, segments) if PART else segments
        for segment in range(s_begin, s_end):
            m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            z = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
            acc = tl.zeros((BLOCK_M, D_PAD), dtype=tl.float32)
            from_key = tl.maximum(segment * SEGMENT, lowest // TILE * TILE)
            to_key = tl.minimum((segment + 1) * SEGMENT, last + 1)
            for tile in range(from_key, to_key, TILE):
                key = tile + tl.arange(0, TILE)
                there = key < length
                page = tl.load(table_ptr + sequence.to(tl.int64) * stride_t + key // PAGE,
                               mask=there, other=0).to(tl.int64)  # fmt: skip
                k_at = page * stride_kb + (key % PAGE) * stride_ks + kv_head * stride_kh
                k = tl.load(k_ptr + k_at[None, :] + d[:, None],
                            mask=there[None, :] & (d < D)[:, None], other=0.0)  # fmt: skip
                v_at = page * stride_vb + (key % PAGE) * stride_vs + kv_head * stride_vh
                v = tl.load(v_ptr + v_at[:, None] + d[None, :],
                            mask=there[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
                s = tl.dot(q, k, input_precision="ieee") * scale
                if SOFTCAP:
                    s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.8853900817779268 / softcap))))
                    s *= 1.4426950408889634
                if ALIBI:
                    s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
                seen = key[None, :] <= position[:, None]
                if WINDOW > 0:
                    seen &= key[None, :] > position[:, None] - WINDOW
                s = tl.where(seen, s, float("-inf"))
                m_next = tl.maximum(m, tl.max(s, axis=1))
                base = tl.where(m_next == float("-inf"), 0.0, m_next)
                fade = tl.exp2(m - base)
                p = tl.exp2(s - base[:, None]).to(v.dtype)
                acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
                z = tl.dot(p, ones, z * fade[:, None], input_precision="ieee")
                m = m_next
            z_one = tl.max(z, axis=1)  # sixteen equal columns
            if PART:
                m_all = m
                z_all = z_one
                acc_all = acc
            else:
                m_all, z_all, acc_all = _join(m_all, z_all, acc_all, m, z_one, acc)
        out_row = (begin + token).to(tl.int64)
        if PART:
            if s_begin < segments:
                line = tl.program_id(2).to(tl.int64) * part_rows + out_row * HEADS + head
                tl.store(m_ptr + line, m_all, mask=real)
                tl.store(z_ptr + line, z_all, mask=real)
                tl.store(o_ptr + line[:, None] * D + d[None, :], acc_all,
                         mask=real[:, None] & (d < D)[None, :])  # fmt: skip
        else:
            if SINKS:
                sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32)
                m_all, z_all, acc_all = _join(m_all, z_all, acc_all, sink * 1.4426950408889634,
                                              tl.full((BLOCK_M,), 1.0, tl.float32),
                                              tl.zeros((BLOCK_M, D_PAD), tl.float32))  # fmt: skip
            o_at = (out_row * stride_ot + head * stride_oh)[:, None] + d[None, :]
            y = acc_all / tl.where(z_all == 0.0, 1.0, z_all)[:, None]
            tl.store(o_ptr + o_at, y.to(o_ptr.dtype.element_ty),
                     mask=real[:, None] & (d < D)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["part_rows", "sequences"])
def _join_kernel(
    p_ptr, m_ptr, z_ptr, o_ptr, start_ptr, length_ptr, sink_ptr, sequences, stride_ot, stride_oh,
    part_rows, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All heads' segments of one token and head, ascending: the loop of the kernel above."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = _find_token(start_ptr, sequences, token)
    end = tl.load(start_ptr + sequence + 1)
    position = tl.load(length_ptr + sequence) - end + token
    d = tl.arange(0, D_PAD)
    one = tl.arange(0, 1)
    m = tl.full((1,), float("-inf"), dtype=tl.float32)
    z = tl.zeros((1,), dtype=tl.float32)
    acc = tl.zeros((1, D_PAD), dtype=tl.float32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(position - WINDOW + 1, 0)
    for segment in range(lowest // SEGMENT, position // SEGMENT + 1):
        line = part_rows.to(tl.int64) * segment + token.to(tl.int64) * HEADS + head
        p_at = p_ptr + line * D + d[None, :] + one[:, None]
        part = tl.load(p_at, mask=(d < D)[None, :], other=0.0)
        m_new = tl.load(m_ptr + line + one)
        z_new = tl.load(z_ptr + line + one)
        m, z, acc = _join(m, z, acc, m_new, z_new, part)
    if SINKS:
        sink = tl.load(sink_ptr + head + one).to(tl.float32) * 1.4426950408889634
        m, z, acc = _join(m, z, acc, sink, tl.full((1,), 1.0, tl.float32),
                          tl.zeros((1, D_PAD), tl.float32))  # fmt: skip
    y = acc / tl.where(z == 0.0, 1.0, z)[:, None]
    at = o_ptr + token.to(tl.int64) * stride_ot + head * stride_oh + d[None, :] + one[:, None]
    tl.store(at, y.to(o_ptr.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def _find_token(start_ptr, sequences, token):
    """The sequence that holds query token `token`."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(start_ptr + middle)
        low = tl.where(first <= token, middle, low)
        high = tl.where(first <= token, high, middle)
    return low


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    schedule: Schedule,
    segment: int,
    parallel_segments: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D] → [T, Hq, D], causal; caches [pages, page, Hk, D] with unit stride along D.

    block_table [S, pages], query_start [S + 1], lengths [S] (keys, the new ones included): int32.
    `segment` (keys, a multiple of 64) belongs to the model; `parallel_segments` ≥ every sequence's
    number of segments runs them side by side, and changes no bit; 0 runs them in one program.
    """
    tokens, heads, dim = q.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    group = heads // kv_heads
    pad = triton.next_power_of_2(group)
    if heads % kv_heads or segment % TILE or schedule.block_m % pad or window < 0:
        raise ValueError(f"attention: {heads} query heads on {kv_heads}, segment {segment}, "
                         f"{schedule.block_m} rows a program, window {window}")  # fmt: skip
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("attention: q and the caches need unit stride along the head dimension")
    y = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    sequences = lengths.shape[0]
    if not tokens:
        return y
    blocks = tokens // (schedule.block_m // pad) + sequences
    part = parallel_segments > 1
    o = y
    m = z = None
    if part:
        o = q.new_empty((parallel_segments, tokens, heads, dim), dtype=torch.float32)
        m = q.new_empty((parallel_segments, tokens, heads), dtype=torch.float32)
        z = torch.empty_like(m)
    log2e = math.log2(math.e)
    d_pad = max(16, triton.next_power_of_2(dim))
    _attention_kernel[(blocks, kv_heads, parallel_segments if part else 1)](
        q, k_cache, v_cache, o, m, z, block_table, query_start, lengths, alibi_slopes, sinks,
        sequences, scale if softcap else scale * log2e, softcap, q.stride(0), q.stride(1),
        y.stride(0), y.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_table.stride(0), tokens * heads, HEADS=heads, GROUP=group, GROUP_PAD=pad, D=dim,
        D_PAD=d_pad, PAGE=page, SEGMENT=segment, WINDOW=window, SOFTCAP=softcap > 0,
        ALIBI=alibi_slopes is not None, SINKS=sinks is not None, PART=part,
        BLOCK_M=schedule.block_m, TILE=TILE, num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )  # fmt: skip
    if part:
        _join_kernel[(tokens, heads)](
            o, m, z, y, query_start, lengths, sinks, sequences, y.stride(0), y.stride(1),
            tokens * heads, HEADS=heads, D=dim, D_PAD=d_pad, SEGMENT=segment, WINDOW=window,
            SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return y
