"""Where top_k cuts a row, and top_p after it, in Triton: the last token that they keep.

No sort. Every filter keeps a prefix of one order (logit from high to low, then token id from low to
high), so a cut is one (logit, token id), found bit by bit: how many tokens, or how much mass, lie
at or above a candidate. Masses are integers, so no sum depends on its order. Most rows are
decided on a short list of their largest tokens; the whole row is walked only where ties are longer
than that list. Rows with top_p alone never come here: `draw` judges them by their winner.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ops.kernels.triton.draw_steps import cleaned, mass, order, shifted

if TYPE_CHECKING:
    from ops.sampling import Rows

LIST = 4096  # room for a row's largest tokens
_FULL_P = tl.constexpr(2**24)


@triton.jit
def _key(x):
    """uint32 that sorts as the cleaned float32 does."""
    return order(x).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _part(x_ptr, id_ptr, start, n, listed, cut, cut_id, BLOCK: tl.constexpr):
    """BLOCK tokens from `start`: logits, ids, keys, and which of them lie at or above the cut."""
    at = start + tl.arange(0, BLOCK)
    x = cleaned(tl.load(x_ptr + at, mask=at < n, other=float("-inf")))
    token = at
    if listed:
        token = tl.load(id_ptr + at, mask=at < n, other=0x7FFFFFFF)
    u = _key(x)
    return x, token, u, (at < n) & ((u > cut) | ((u == cut) & (token <= cut_id)))


@triton.jit
def _search(
    x_ptr, id_ptr, n, listed, best, inv_t, low, cut, cut_id, target,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, above): the largest key such that the tokens (MASS: their mass) at or above it reach
    the target, and how much lies strictly above it. Three bits a pass. Only tokens inside the cut.
    """
    pivot = tl.arange(0, 8)
    key = cut * 0
    above = target * 0
    for step in range(11):
        shift = 30 - 3 * step
        at_least = key + (pivot.to(tl.uint32) << shift)
        acc = tl.zeros((BLOCK, 8), tl.int64)
        for start in range(0, n, BLOCK):
            x, _, u, inside = _part(x_ptr, id_ptr, start, n, listed, cut, cut_id, BLOCK)
            if MASS:
                t = shifted(x, best) * inv_t
                value = tl.where(inside & (t >= low), mass(t), 0)
            else:
                value = inside.to(tl.int32)
            acc += tl.where(u[:, None] >= at_least[None, :], value[:, None], 0).to(tl.int64)
        held = tl.sum(acc, axis=0)
        real = (step > 0) | (pivot < 4)  # 4 << 30 is beyond 32 bits
        reached = real & (held >= target)
        short = tl.max(tl.where(reached | (real == 0), -1, held), axis=0)
        above = tl.where(short >= 0, short, above)
        key += tl.max(tl.where(reached, pivot, 0), axis=0).to(tl.uint32) << shift
    return key, above


@triton.jit
def _count(x_ptr, id_ptr, n, listed, cut, cut_id, key, id_end, BLOCK: tl.constexpr):
    """How many tokens inside the cut have this key and an id below id_end."""
    acc = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        _, token, u, inside = _part(x_ptr, id_ptr, start, n, listed, cut, cut_id, BLOCK)
        acc += (inside & (u == key) & (token < id_end)).to(tl.int32)
    return tl.sum(acc, axis=0)


@triton.jit
def _last_id(x_ptr, id_ptr, n, listed, cut, cut_id, key, r, BLOCK: tl.constexpr):
    """The id of the r-th token, by id, of those inside the cut with this key; where there are no
    more than r, whatever keeps them all.
    """
    last = tl.where(key == cut, cut_id, 0x7FFFFFFF)
    if _count(x_ptr, id_ptr, n, listed, cut, cut_id, key, 0x7FFFFFFF, BLOCK) > r:
        last = last * 0
        for bit in range(31):  # the largest id with fewer than r below it
            c = last | (1 << (30 - bit))
            below = _count(x_ptr, id_ptr, n, listed, cut, cut_id, key, c, BLOCK)
            last = tl.where(below < r, c, last)
    return last


@triton.jit
def _edges_kernel(
    x_ptr, peak_ptr, table_ptr, slot_ptr, list_x_ptr, list_id_ptr, edge_ptr,
    V, groups, stride_x,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """edge[row] = (logit, token id) of the last token that top_k, and top_p among what it leaves,
    keep; (-inf, the largest id) for a row without top_k.
    """
    row = tl.program_id(0).to(tl.int64)
    s = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * WIDTH
    k, p = tl.load(s + 5), tl.load(s + 6)
    inv_t = tl.load(s + 4).to(tl.float32, bitcast=True)
    low = tl.load(s + 7).to(tl.float32, bitcast=True)
    x_ptr += row * stride_x
    peak_ptr += row * groups
    list_x_ptr += row * LIST
    list_id_ptr += row * LIST
    g = tl.arange(0, GROUPS)
    peaks = tl.load(peak_ptr + g, mask=g < groups, other=float("-inf"))
    best = tl.max(peaks, axis=0)
    cut = (k * 0).to(tl.uint32)  # everything
    cut_id = k * 0 + 0x7FFFFFFF
    if k > 0:
        # The k-th largest peak: at least k tokens lie at or above it.
        bound = cut
        tops = _key(peaks)
        for bit in range(32):
            c = bound | (tl.full((), 1, tl.uint32) << (31 - bit))
            enough = tl.sum(((tops >= c) & (g < groups)).to(tl.int32), axis=0) >= k
            bound = tl.where(enough, c, bound)
        bound = tl.where(k > groups, cut, bound)
        count = k * 0  # how many are listed
        for start in range(0, V, BLOCK):
            over = start // GROUP + tl.arange(0, BLOCK // GROUP)
            high = tl.load(peak_ptr + over, mask=over < groups, other=float("-inf"))
            if tl.max(_key(high), axis=0) >= bound:
                x, token, u, inside = _part(x_ptr, list_id_ptr, start, V, False, cut, cut_id, BLOCK)
                hit = inside & (u >= bound)
                spot = count + tl.cumsum(hit.to(tl.int32), axis=0) - 1
                tl.store(list_x_ptr + spot, x, mask=hit & (spot < LIST))
                tl.store(list_id_ptr + spot, token, mask=hit & (spot < LIST))
                count += tl.sum(hit.to(tl.int32), axis=0)
        tl.debug_barrier()
        listed = count <= LIST
        n = tl.where(listed, count, V)
        src = x_ptr
        if listed:
            src = list_x_ptr
        key, above = _search(
            src, list_id_ptr, n, listed, best, inv_t, low, cut, cut_id, k.to(tl.int64),
            False, BLOCK,
        )  # fmt: skip
        cut_id = _last_id(src, list_id_ptr, n, listed, cut, cut_id, key, k - above, BLOCK)
        cut = key
        if p < _FULL_P:
            acc = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, n, BLOCK):
                x, _, _, inside = _part(src, list_id_ptr, start, n, listed, cut, cut_id, BLOCK)
                t = shifted(x, best) * inv_t
                acc += tl.where(inside & (t >= low), mass(t), 0).to(tl.int64)
            total = tl.sum(acc, axis=0)
            target = (total >> 24) * p + (((total & (_FULL_P - 1)) * p) >> 24)
            key, above = _search(
                src, list_id_ptr, n, listed, best, inv_t, low, cut, cut_id, target, True, BLOCK
            )
            o = (key ^ 0x80000000).to(tl.int32, bitcast=True)
            value = (o ^ ((o >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            each = mass(shifted(value, best) * inv_t).to(tl.int64)
            r = (target - above + each - 1) // tl.maximum(each, 1)
            cut_id = _last_id(src, list_id_ptr, n, listed, cut, cut_id, key, r, BLOCK)
            cut = key
    o = (cut ^ 0x80000000).to(tl.int32, bitcast=True)
    value = (o ^ ((o >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(edge_ptr + row * 2, tl.where(cut == 0, float("-inf"), value))
    tl.store(edge_ptr + row * 2 + 1, cut_id.to(tl.float32, bitcast=True))


@functools.lru_cache(maxsize=4096)
def lowest_with(least: int) -> float:
    """The smallest t <= 0 with a mass of at least `least`, which is 1 to 2**30."""
    from ops.sampling import mass as defined

    inside, outside = 0, 0x41B00000  # magnitudes of t, as bits: 0 is in, 22 is out
    while outside - inside > 1:
        middle = (inside + outside) // 2
        t = -torch.tensor([middle], dtype=torch.int32).view(torch.float32)
        if int(defined(t)) >= least:
            inside = middle
        else:
            outside = middle
    return -float(torch.tensor([inside], dtype=torch.int32).view(torch.float32))


def lowest(opts: Rows) -> npt.NDArray[np.float32]:
    """The smallest t that min_p keeps, for each row; minus infinity where it is off or greedy."""
    low = np.full(opts.min_p.shape, -np.inf, np.float32)
    for row in np.nonzero(opts.min_p * (opts.inv_t > 0))[0]:
        low[row] = lowest_with(int(opts.min_p[row]))
    return low


def edges(
    x: torch.Tensor, peak: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, group: int,
    width: int, exact: Any,
) -> torch.Tensor:  # fmt: skip
    """float32 [N, 2]: the last token kept, as (logit, token id as bits).

    x float32 [N, V] with unit stride along V, its peaks [N, groups], the table of `draw` and each
    row's place in it.
    """
    n, vocab = x.shape
    groups = peak.shape[1]
    edge = torch.empty((n, 2), dtype=torch.float32, device=x.device)
    list_x = torch.empty((n, LIST), dtype=torch.float32, device=x.device)
    list_id = torch.empty((n, LIST), dtype=torch.int32, device=x.device)
    _edges_kernel[(n,)](
        x, peak, table, slots, list_x, list_id, edge, vocab, groups, x.stride(0),
        GROUP=group, GROUPS=triton.next_power_of_2(groups), LIST=LIST, BLOCK=1024, WIDTH=width,
        num_warps=8, **exact,
    )  # fmt: skip
    return edge
