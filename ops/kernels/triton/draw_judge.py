"""The filters of the seeded draw in a form that Ascend's compiler takes; tokens as `draw.draw`'s.

That compiler crashes on the search of `draw_filter`, with its lists and its scan, and does not come
to an end with `draw._settle_kernel`, which draws inside a loop. Here nothing is listed, and each
round is a launch: `_kth_kernel` finds the last token of top_k bit by bit, over the whole row;
`_judge_kernel` asks of each row's winner whether top_p keeps it, and if not says where the next
draw ends. A row that is settled draws its own winner again until all are.

Not in use on an NPU: there the definition draws, until somebody saw how an NPU rounds. Compiled
offline for it, and run in the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ops.kernels.triton import draw as whole
from ops.kernels.triton.draw import _FULL_P, _NO_ID, _read
from ops.kernels.triton.draw_steps import mass, order, shifted

if TYPE_CHECKING:
    from ops.sampling import Rows

BLOCK = 1024
_LEAST = tl.constexpr(-(2**31))


@triton.jit
def _value(o):
    """The float32 that sorts as the int32 `o`; the inverse of `order`."""
    return (o ^ ((o >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(x_ptr, V, key, least, id_end, BLOCK: tl.constexpr):
    """Tokens that sort above `least`, and those at `key` with an id below `id_end`."""
    above = tl.zeros((BLOCK,), tl.int32)
    tied = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        o = order(_read(x_ptr, at, V))
        above += ((at < V) & (o > least)).to(tl.int32)
        tied += ((at < V) & (o == key) & (at < id_end)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(tied, axis=0)


@triton.jit
def _kth_kernel(
    x_ptr, table_ptr, slot_ptr, kth_ptr, V, stride_x, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """kth[row] = (logit, token id) of the last token that top_k keeps; (-inf, the largest id) for a
    row without top_k. Counts of integers: no order.
    """
    row = tl.program_id(0).to(tl.int64)
    s = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * WIDTH
    k = tl.maximum(tl.load(s + 5), tl.load(s + 8))
    x_ptr += row * stride_x
    key = k * 0 + _LEAST  # the largest that k tokens reach
    last = k * 0
    if k > 0:
        for bit in range(32):
            c = key + ((k * 0 + 1) << (31 - bit))  # wraps from the least to 0
            reach, _ = _count(x_ptr, V, c, c - 1, 0, BLOCK)
            key = tl.where(reach >= k, c, key)
        above, _ = _count(x_ptr, V, key, key, 0, BLOCK)
        for bit in range(31):  # the largest id with fewer than k - above of the tied below it
            c = last | (1 << (30 - bit))
            _, below = _count(x_ptr, V, key, key, c, BLOCK)
            last = tl.where(below < k - above, c, last)
    tl.store(kth_ptr + row * 2, tl.where(k > 0, _value(key), float("-inf")))
    tl.store(kth_ptr + row * 2 + 1, tl.where(k > 0, last, _NO_ID).to(tl.float32, bitcast=True))


@triton.jit
def _judge_kernel(
    x_ptr, table_ptr, slot_ptr, best_ptr, out_ptr, kth_ptr, edge_ptr, left_ptr, V, stride_x,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """left[row] = whether top_p leaves the drawn token out; edge[row]: the last token of the next
    draw, which is the one before the drawn, or the drawn itself. Masses are integers: no order.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(out_ptr + row).to(tl.int32)
    best = tl.load(best_ptr + row)
    s = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * WIDTH
    inv_t = tl.load(s + 4).to(tl.float32, bitcast=True)
    low = tl.load(s + 7).to(tl.float32, bitcast=True)
    p = tl.minimum(tl.load(s + 6), tl.load(s + 9))
    x_ptr += row * stride_x
    kth = tl.load(kth_ptr + row * 2)
    kth_id = tl.load(kth_ptr + row * 2 + 1).to(tl.int32, bitcast=True)
    mine = tl.max(_read(x_ptr, token + tl.arange(0, 16) * 0, V), axis=0)
    before = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _read(x_ptr, at, V)
        t = shifted(x, best) * inv_t
        kept = (at < V) & ((x > kth) | ((x == kth) & (at <= kth_id))) & (t >= low)
        q = tl.where(kept, mass(t), 0).to(tl.int64)
        total += q
        before += tl.where((x > mine) | ((x == mine) & (at < token)), q, 0)
    held = tl.sum(total, axis=0)
    target = (held >> 24) * p + (((held & (_FULL_P - 1)) * p) >> 24)
    out = (tl.sum(before, axis=0) >= target) & (p < _FULL_P)
    out = out & (best > float("-inf")) & (inv_t > 0.0)
    tl.store(edge_ptr + row * 2, mine)
    tl.store(edge_ptr + row * 2 + 1, (token - out.to(tl.int32)).to(tl.float32, bitcast=True))
    tl.store(left_ptr + row, out.to(tl.int32))


def draw(logits: torch.Tensor, opts: Rows, *, lanes: int = 128, parts: int = 8) -> torch.Tensor:
    """float [N, V], not changed -> int64 [N]; `opts` of `ops.sampling`. `lanes` and `parts` change
    speed alone.
    """
    n, vocab = logits.shape
    x = logits.float().contiguous()
    numbers = torch.from_numpy(whole.table(opts, vocab)).to(x.device)
    slots = torch.arange(n, dtype=torch.int32, device=x.device)
    positions = torch.from_numpy(opts.position).to(x.device)
    groups, blocks = triton.cdiv(vocab, whole.GROUP), triton.cdiv(vocab, 4 * lanes)
    peak = torch.empty((n, groups), dtype=torch.float32, device=x.device)
    best, score = peak.new_empty(n), peak.new_empty((n, parts))
    kth, left = peak.new_empty((n, 2)), slots.clone()
    ids = torch.empty((n, parts), dtype=torch.int32, device=x.device)
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    sizes, laid = {"BLOCK": BLOCK, "WIDTH": whole.WIDTH}, {"WIDTH": whole.WIDTH, "SPLIT": True}
    laid |= {"GROUPS": triton.next_power_of_2(groups), "LANES": lanes, "CUT": True, "EDGES": True}
    whole._peaks_kernel[(n, triton.cdiv(groups, 16))](
        x, peak, vocab, groups, vocab, GROUP=whole.GROUP, TILE=16
    )
    _kth_kernel[(n,)](x, numbers, slots, kth, vocab, vocab, **sizes)
    edge = kth.clone()
    while True:
        whole._draw_kernel[(n, parts)](
            x, peak, numbers, slots, positions, edge, best, score, ids,
            vocab, groups, blocks, parts, vocab, COVER=4 * lanes // whole.GROUP, **laid,
        )  # fmt: skip
        whole._finish_kernel[(n,)](
            score, ids, best, out, parts, PARTS=triton.next_power_of_2(parts)
        )
        _judge_kernel[(n,)](
            x, numbers, slots, best, out, kth, edge, left, vocab, vocab, **sizes
        )  # fmt: skip
        if not left.any():
            return out
