"""The seeded draw on CUDA and Ascend: token ids equal to those of ops/sampling.py.

A batch of greedy rows takes one launch. Any other takes three: `_peaks`, the largest logit of every
128 tokens; `_draw`, where each program takes a part of a row and keeps its best (score, token), and
skips a block whose largest possible score is below one that the row already has; `_finish`, the
best part of each row. A row's result does not depend on how it is cut into parts: scores are
compared, never added, and ties go to the lowest token id.

Filters need no sort. min_p is a bound on t. A small top_k is found by `draw_filter` and bounds the
draw (one launch more). top_p, and a large top_k, are settled afterwards, by `_settle` in the place
of `_finish`: all filters keep a prefix of one order, so the row's winner among more tokens is its
winner under the filter if it lies inside, which one sum decides: the mass (or the number) of the
tokens before it. If it lies outside, so does everything after it, and the row is drawn again among
the tokens before it. Whoever keeps the fraction p of the mass needs 1 + log(1/p) draws on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ops.kernels.triton import direct, draw_filter
from ops.kernels.triton.draw_steps import (
    LOWEST_T,
    MAX_NOISE,
    MIN_NOISE,
    cleaned,
    gumbel,
    mass,
    philox,
    shifted,
)  # fmt: skip

if TYPE_CHECKING:
    from ops.sampling import Rows

GROUP = 128  # tokens under one peak
WIDTH = 12  # numbers of a row in the table
_FULL_P = tl.constexpr(2**24)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _read(x_ptr, at, V):
    """Logits at `at`, cleaned, float32; minus infinity beyond the vocabulary."""
    return cleaned(tl.load(x_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32))


@triton.jit
def _greedy_kernel(x_ptr, out_ptr, V, stride_x, BLOCK: tl.constexpr):
    """The first token with the largest logit of each row; token 0 where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.full((BLOCK,), _NO_ID, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _read(x_ptr, at, V)
        better = x > top
        top_id = tl.where(better, at, top_id)
        top = tl.where(better, x, top)
    best = tl.max(top, axis=0)
    first = tl.min(tl.where(top == best, top_id, _NO_ID), axis=0)
    tl.store(out_ptr + row, tl.where(best == float("-inf"), 0, first).to(tl.int64))


@triton.jit(do_not_specialize=["groups"])
def _peaks_kernel(x_ptr, peak_ptr, V, groups, stride_x, GROUP: tl.constexpr, TILE: tl.constexpr):
    """peak[row, g] = largest of x[row, GROUP * g ...], NaN left out. TILE groups a program."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _read(x_ptr + row * stride_x, at, V)
    tl.store(peak_ptr + row * groups + g, tl.max(x, axis=1), mask=g < groups)


@triton.jit
def _stream(s, position, zero):
    """(k0, k1, choice, position) of a row as uint32 lanes; `s` points at its numbers."""
    k0, k1 = tl.load(s).to(tl.uint32) + zero, tl.load(s + 1).to(tl.uint32) + zero
    place = (position.to(tl.int32) + tl.load(s + 3)).to(tl.uint32)
    return k0, k1, tl.load(s + 2).to(tl.uint32) + zero, place + zero


@triton.jit
def _best_of(
    x_ptr, peak_ptr, V, groups, start, blocks, step, best, inv_t, k0, k1, choice, position,
    edge, edge_id, low,
    COVER: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """(score, token) of the best among blocks start, start + step, …; CUT: among the tokens that
    lie at or above (edge, edge_id) with a t of at least `low`, the row's best token always being
    one. A block is 4 * LANES tokens, which are LANES Philox blocks and lie under COVER peaks.
    """
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.uint32)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    top_id = tl.full((LANES,), _NO_ID, tl.int32)
    greedy = inv_t == 0.0
    reached = tl.where(greedy, float("-inf"), MIN_NOISE)  # the row's best token has t = 0
    for block in range(start, blocks, step):
        c0 = block * LANES + lane
        first = (c0 >> 4) * 64 + (c0 & 15)
        over = block * COVER + tl.arange(0, COVER)
        ceiling = tl.max(tl.load(peak_ptr + over, mask=over < groups, other=float("-inf")), axis=0)
        if greedy:
            possible = ceiling == best
        else:
            possible = shifted(ceiling, best) * inv_t + MAX_NOISE >= reached
            if CUT:
                possible = possible & (ceiling >= edge)
        if possible:
            if greedy:
                w0, w1, w2, w3 = zero, zero, zero, zero
            else:
                w0, w1, w2, w3 = philox(c0.to(tl.uint32), position, choice, zero + 1, k0, k1, SPLIT)
            for j in tl.static_range(4):
                w = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))
                at = first + 16 * j
                x = _read(x_ptr, at, V)
                t = shifted(x, best) * inv_t
                score = tl.where(greedy, x, t + gumbel(w))
                score = tl.where(x == float("-inf"), float("-inf"), score)
                if CUT:
                    keep = ((x > edge) | ((x == edge) & (at <= edge_id))) & (t >= low)
                    score = tl.where(keep, score, float("-inf"))
                better = (score > top) | ((score == top) & (at < top_id))
                top_id = tl.where(better & (at < V), at, top_id)
                top = tl.where(better, score, top)
            reached = tl.maximum(reached, tl.max(top, axis=0))
    score = tl.max(top, axis=0)
    return score, tl.min(tl.where(top == score, top_id, _NO_ID), axis=0)


@triton.jit(do_not_specialize=["groups", "blocks", "parts"])
def _draw_kernel(
    x_ptr, peak_ptr, table_ptr, slot_ptr, position_ptr, edge_ptr, best_ptr, score_ptr, id_ptr,
    V, groups, blocks, parts, stride_x,
    GROUPS: tl.constexpr, COVER: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr,
    CUT: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Part program_id(1) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    peak_ptr += row * groups
    g = tl.arange(0, GROUPS)
    best = tl.max(tl.load(peak_ptr + g, mask=g < groups, other=float("-inf")), axis=0)
    s = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * WIDTH
    inv_t = tl.load(s + 4).to(tl.float32, bitcast=True)
    low = tl.load(s + 7).to(tl.float32, bitcast=True)
    zero = (tl.arange(0, LANES) * 0).to(tl.uint32)
    k0, k1, choice, position = _stream(s, tl.load(position_ptr + row), zero)
    edge = best * 0 - float("inf")
    edge_id = part * 0 + _NO_ID
    if EDGES:
        edge = tl.load(edge_ptr + row * 2)
        edge_id = tl.load(edge_ptr + row * 2 + 1).to(tl.int32, bitcast=True)
    score, token = _best_of(
        x_ptr + row * stride_x, peak_ptr, V, groups, part, blocks, parts, best, inv_t,
        k0, k1, choice, position, edge, edge_id, low, COVER, LANES, SPLIT, CUT,
    )  # fmt: skip
    tl.store(score_ptr + row * parts + part, score)
    tl.store(id_ptr + row * parts + part, token)
    tl.store(best_ptr + row, best)


@triton.jit
def _first(score_ptr, id_ptr, row, parts, PARTS: tl.constexpr):
    """The first token with the largest score of a row's parts."""
    p = tl.arange(0, PARTS)
    score = tl.load(score_ptr + row * parts + p, mask=p < parts, other=float("-inf"))
    at = tl.load(id_ptr + row * parts + p, mask=p < parts, other=_NO_ID)
    return tl.min(tl.where(score == tl.max(score, axis=0), at, _NO_ID), axis=0)


@triton.jit(do_not_specialize=["parts"])
def _finish_kernel(score_ptr, id_ptr, best_ptr, out_ptr, parts, PARTS: tl.constexpr):
    """The drawn token of each row; token 0 where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    token = _first(score_ptr, id_ptr, row, parts, PARTS)
    none = tl.load(best_ptr + row) == float("-inf")
    tl.store(out_ptr + row, tl.where(none, 0, token).to(tl.int64))


@triton.jit
def _before(
    x_ptr, peak_ptr, V, groups, best, inv_t, low, mine, token, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(mass before the token, mass of all, tokens before it), in the order of the filters."""
    earlier = tl.zeros((BLOCK,), tl.int64)
    whole = tl.zeros((BLOCK,), tl.int64)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        over = start // GROUP + tl.arange(0, BLOCK // GROUP)
        ceiling = tl.max(tl.load(peak_ptr + over, mask=over < groups, other=float("-inf")), axis=0)
        weighs = shifted(ceiling, best) * inv_t >= LOWEST_T
        if weighs | (ceiling >= mine):
            at = start + tl.arange(0, BLOCK)
            x = _read(x_ptr, at, V)
            ahead = (at < V) & ((x > mine) | ((x == mine) & (at < token)))
            t = shifted(x, best) * inv_t
            q = tl.where((at < V) & (t >= low), mass(t), 0).to(tl.int64)
            whole += q
            earlier += tl.where(ahead, q, 0)
            count += ahead.to(tl.int32)
    return tl.sum(earlier, axis=0), tl.sum(whole, axis=0), tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["groups", "blocks", "parts"])
def _settle_kernel(
    x_ptr, peak_ptr, table_ptr, slot_ptr, position_ptr, best_ptr, score_ptr, id_ptr, out_ptr,
    V, groups, blocks, parts, stride_x,
    PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, COVER: tl.constexpr,
    LANES: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As `_finish_kernel`, for rows whose top_k or top_p is still to be judged."""
    row = tl.program_id(0).to(tl.int64)
    token = _first(score_ptr, id_ptr, row, parts, PARTS)
    best = tl.load(best_ptr + row)
    s = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * WIDTH
    inv_t = tl.load(s + 4).to(tl.float32, bitcast=True)
    low = tl.load(s + 7).to(tl.float32, bitcast=True)
    k, p = tl.load(s + 8), tl.load(s + 9)
    x_ptr += row * stride_x
    peak_ptr += row * groups
    filtered = (best > float("-inf")) & (inv_t > 0) & ((k > 0) | (p < _FULL_P))
    judging = filtered.to(tl.int32)
    while judging > 0:
        mine = cleaned(tl.load(x_ptr + token).to(tl.float32))
        earlier, total, count = _before(
            x_ptr, peak_ptr, V, groups, best, inv_t, low, mine, token, GROUP, BLOCK
        )
        target = (total >> 24) * p + (((total & (_FULL_P - 1)) * p) >> 24)
        inside = ((k == 0) | (count < k)) & ((p == _FULL_P) | (earlier < target))
        judging = tl.where(inside, 0, judging)
        if judging > 0:
            zero = (tl.arange(0, LANES) * 0).to(tl.uint32)
            k0, k1, choice, position = _stream(s, tl.load(position_ptr + row), zero)
            _, token = _best_of(
                x_ptr, peak_ptr, V, groups, 0, blocks, 1, best, inv_t, k0, k1, choice, position,
                mine, token - 1, low, COVER, LANES, SPLIT, True,
            )  # fmt: skip
    tl.store(out_ptr + row, tl.where(best == float("-inf"), 0, token).to(tl.int64))


@dataclass(frozen=True)
class Kinds:
    """What a batch's rows need; a launch that no row needs is left out."""

    drawn: bool  # any row that is not greedy
    cut: bool  # any with min_p, or with edges
    edges: bool  # any with a top_k that draw_filter finds
    settled: bool  # any whose filter is judged after the draw


#: What changes speed alone: tokens a step and warps of `_greedy` and `_settle`, warps of `_draw`.
GREEDY, SETTLE, DRAW_WARPS = (16384, 32), (2048, 16), 8

#: top_k up to this is found before the draw; above, few winners lie outside.
SMALL_K = 1024


def table(opts: Rows, vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [N, WIDTH]: seed low and high, choice, what to add to the position, 1 / T (bits),
    top_k and top_p for draw_filter, the lowest t of min_p (bits), top_k and top_p to be judged
    after the draw; 0 and 2**24 where there is none.
    """
    a = np.zeros((opts.seed.shape[0], WIDTH), dtype=np.int32)
    k = np.where((opts.top_k < vocab) & (opts.inv_t > 0), opts.top_k, 0)
    p = np.where(opts.inv_t > 0, opts.top_p, _FULL_P.value)
    early = (k > 0) & ((k <= SMALL_K) | (p < _FULL_P.value))
    a[:, :2] = np.ascontiguousarray(opts.seed).view(np.int32).reshape(-1, 2)
    a[:, 2] = opts.choice.astype(np.uint32).view(np.int32)
    a[:, 4] = np.ascontiguousarray(opts.inv_t).view(np.int32)
    a[:, 5], a[:, 6] = np.where(early, k, 0), np.where(early, p, _FULL_P.value)
    a[:, 7] = draw_filter.lowest(opts).view(np.int32)
    a[:, 8], a[:, 9] = np.where(early, 0, k), np.where(early, _FULL_P.value, p)
    return a


def bits(a: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One number a row of `table`: which launches it needs, for `kinds`."""
    edges, settled = a[:, 5] > 0, (a[:, 8] > 0) | (a[:, 9] < _FULL_P.value)
    low = a[:, 7].view(np.float32) > -np.inf
    return ((a[:, 4] != 0) + 2 * (low | edges) + 4 * edges + 8 * settled).astype(np.uint8)


def kinds(of_rows: np.ndarray[Any, np.dtype[np.uint8]]) -> Kinds:
    """What a batch of rows with these `bits` needs."""
    found = int(np.bitwise_or.reduce(of_rows, initial=0))
    return Kinds(bool(found & 1), bool(found & 2), bool(found & 4), bool(found & 8))


def draw(
    logits: torch.Tensor, opts: Rows, *, lanes: int = 512, programs: int = 4096, split: bool = False
) -> torch.Tensor:
    """float [N, V], not changed -> int64 [N]; `opts` of `ops.sampling`.

    `lanes` (a power of 2, at least 32), `programs` and `split` (16-bit multiplications) change
    speed alone. What the options come to on the device is kept with them, so that a batch which
    goes on costs one copy of its positions a step.
    """
    device, vocab = logits.device, logits.shape[1]
    key = ("triton", device, vocab)
    if key not in opts.forms:
        a = table(opts, vocab)
        slots = torch.arange(a.shape[0], dtype=torch.int32)
        opts.forms[key] = there(torch.from_numpy(a), device), there(slots, device), kinds(bits(a))
    numbers, slots, need = opts.forms[key]
    if not need.drawn:
        return greedy(logits)
    positions = there(torch.from_numpy(opts.position), device)
    return launch(logits, numbers, slots, positions, need, lanes, programs, split)


def there(a: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, copied without waiting for what it is busy with."""
    return (a.pin_memory() if device.type == "cuda" else a).to(device, non_blocking=True)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The first token with the largest logit of each row: float [N, V] -> int64 [N]."""
    n, vocab = logits.shape
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    if n:
        block = min(GREEDY[0], triton.next_power_of_2(vocab))
        key = (vocab, x.stride(0), block, *direct.place(x))
        direct.launch(
            _greedy_kernel, (n, 1, 1), (x, out, vocab, x.stride(0)),
            {"BLOCK": block, "num_warps": GREEDY[1]}, key,
        )  # fmt: skip
    return out


def launch(
    logits: torch.Tensor, numbers: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    need: Kinds, lanes: int = 512, programs: int = 4096, split: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The draw from numbers that are on the device: float [N, V] -> int64 [N].

    numbers int32 [S, WIDTH] as `table` makes them; slots int [N], which row of it belongs to which
    row of logits; positions int [N], to which the table's own offset is added; `need` covers them.
    """
    if not need.drawn:
        return greedy(logits)
    n, vocab = logits.shape
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    if need.edges:
        x = x.float()  # its list holds what the logits are
    groups, blocks = triton.cdiv(vocab, GROUP), triton.cdiv(vocab, 4 * lanes)
    parts = max(1, min(blocks, programs // max(n, 1), 64))
    peak = torch.empty((n, groups), dtype=torch.float32, device=x.device)
    best, score = peak.new_empty(n), peak.new_empty((n, parts))
    ids = torch.empty((n, parts), dtype=torch.int32, device=x.device)
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    if not n:
        return out
    exact = {"enable_fp_fusion": False} if x.device.type == "cuda" else {}
    tile, cover, stride = 16, 4 * lanes // GROUP, x.stride(0)
    key = (vocab, stride, lanes, split, need, *direct.place(x, numbers, slots, positions))
    direct.launch(
        _peaks_kernel, (n, triton.cdiv(groups, tile), 1), (x, peak, vocab, groups, stride),
        {"GROUP": GROUP, "TILE": tile, **exact}, key,
    )  # fmt: skip
    edge = peak
    if need.edges:
        edge = draw_filter.edges(x, peak, numbers, slots, GROUP, WIDTH, exact)
    direct.launch(
        _draw_kernel, (n, parts, 1),
        (x, peak, numbers, slots, positions, edge, best, score, ids, vocab, groups, blocks, parts,
         stride),
        {"GROUPS": triton.next_power_of_2(groups), "COVER": cover, "LANES": lanes, "SPLIT": split,
         "CUT": need.cut, "EDGES": need.edges, "WIDTH": WIDTH, "num_warps": DRAW_WARPS, **exact},
        key,
    )  # fmt: skip
    widest = triton.next_power_of_2(parts)
    if need.settled:
        direct.launch(
            _settle_kernel, (n, 1, 1),
            (x, peak, numbers, slots, positions, best, score, ids, out, vocab, groups, blocks,
             parts, stride),
            {"PARTS": widest, "GROUP": GROUP, "BLOCK": SETTLE[0], "COVER": cover, "LANES": lanes,
             "SPLIT": split, "WIDTH": WIDTH, "num_warps": SETTLE[1], **exact}, (widest, *key),
        )  # fmt: skip
    else:
        direct.launch(
            _finish_kernel, (n, 1, 1), (score, ids, best, out, parts), {"PARTS": widest, **exact},
            (widest, x.device.index),
        )  # fmt: skip
    return out


def rehearse(logits: torch.Tensor) -> torch.Tensor:
    """Every launch that a batch of this size can need, so that none compiles, or asks for its first
    memory, under a request. Gives int64 [N]: the greedy tokens.
    """
    n, device = logits.shape[0], logits.device
    numbers = torch.zeros((n, WIDTH), dtype=torch.int32, device=device)  # rows that are greedy
    slots = torch.arange(n, dtype=torch.int32, device=device)
    for x in (logits, logits.float()):
        for cut, edges, settled in (
            (False, False, False), (True, False, False), (True, True, False), (True, False, True),
            (False, False, True), (True, True, True),
        ):  # fmt: skip
            launch(x, numbers, slots, slots.long(), Kinds(True, cut, edges, settled))
    return greedy(logits)
