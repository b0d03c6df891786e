"""The start's self-check on NVIDIA: each bound op at many row counts and places, equal bit for bit.

Called as models call it: through the operators of `samebits`, torch's own functions, vLLM's
FlashAttention and vLLM's experts. Weights of planned products are the loaded ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ops.bindings_cuda import define_operators, loaded, moe_tile
from ops.kernels.dense import BANDS, by_triton, planner
from ops.registry import NotInvariant
from ops.selfcheck import same

ROWS = (1, 2, 7, 16, 33, 64, 65, 128, 129, 255, 256, 257, 512)
#: Both ends of every band of a plan up to 1,024 rows, and three in between.
BAND_ROWS = sorted(
    {low + 1 + (high - low - 1) * i // 4
     for low, high in pairwise((0, *BANDS)) if high <= 1024 for i in range(5)}
)  # fmt: skip
MOST_BYTES = 2**27  # of one check's result


def _randn(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    source = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, generator=source, device="cuda") * scale).to(dtype)


def check_linear() -> None:
    """Every planned weight: each band's bits equal the definition's, and a row's those alone."""
    define_operators()
    weights = list(planner.weights.values()) or [(_randn(3072, 1024, scale=0.03), None)]
    for weight, bias in weights:
        columns, depth = weight.shape
        most = min(BANDS[-1], max(512, 1024), MOST_BYTES // (2 * columns))
        x = _randn(most, depth, seed=columns + depth, dtype=weight.dtype)
        want = by_triton(x, weight, bias)
        for rows in BAND_ROWS:
            if rows <= most:
                case = f"[{columns}, {depth}] of {weight.dtype}, {rows} rows"
                got = torch.ops.samebits.linear(x[most - rows :], weight, bias)
                same("vllm.UnquantizedLinearMethod", case, got, want[most - rows :])


def check_norm() -> None:
    """RMSNorm at the loaded widths and at some of heads and of hidden states, around 256 rows."""
    define_operators()
    known = [(n, g) for n in (128, 576, 2048, 4096) for g in (False, True)]
    for columns, gemma in dict.fromkeys([*known, *loaded("norms")]):
        x, r, w = (_randn(520, columns, seed=i) for i in range(3))
        want = torch.ops.samebits.rms_norm(x, w[0], 1e-6, gemma)
        fused = torch.ops.samebits.fused_add_rms_norm(x, r, w[0], 1e-6, gemma)
        for rows in ROWS:
            case = f"{columns} columns, {rows} rows, gemma {gemma}"
            got = torch.ops.samebits.rms_norm(x[520 - rows :], w[0], 1e-6, gemma)
            same("vllm.RMSNorm", case, got, want[520 - rows :])
            both = torch.ops.samebits.fused_add_rms_norm(
                x[520 - rows :], r[520 - rows :], w[0], 1e-6, gemma
            )
            for a, b in zip(both, fused, strict=True):
                same("vllm.RMSNorm", case + ", fused", a, b[520 - rows :])


def check_aten(name: str) -> None:
    """One op of the net through torch itself."""
    w = _randn(1024, 384, seed=1, scale=0.03)
    bias = _randn(384, seed=2)
    calls: dict[str, Any] = {
        "mm": lambda x: torch.mm(x, w),
        "addmm": lambda x: torch.addmm(bias, x, w),
        "bmm": lambda x: torch.bmm(x[None], w[None])[0],
        "_softmax": lambda x: torch.softmax(x.float(), -1),
        "_log_softmax": lambda x: torch.log_softmax(x.float(), -1),
        "sum.dim_IntList": lambda x: x.float().sum(-1, keepdim=True),
        "mean.dim": lambda x: x.float().mean(-1, keepdim=True),
    }
    x = _randn(512, 1024, seed=3)
    want = calls[name](x)
    for rows in ROWS:
        got = calls[name](x[512 - rows :])
        same(f"aten::{name}", f"{rows} rows", got, want[512 - rows :])


def paged(
    contexts: list[int], heads: int, kv_heads: int, dim: int, page: int = 16
) -> dict[str, Tensor]:
    """q for every position (8192 at most) and a paged cache in vLLM's layout."""
    pages = sum(-(-n // page) for n in contexts)
    cache = _randn(pages, 2, page, kv_heads, dim, seed=4)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).int().cuda()
    table = torch.zeros(
        (len(contexts), -(-max(contexts) // page)), dtype=torch.int32, device="cuda"
    )
    used = 0
    for s, n in enumerate(contexts):
        count = -(-n // page)
        table[s, :count] = order[used : used + count]
        used += count
    k, v = cache.unbind(1)
    return {
        "q": _randn(min(sum(contexts), 8192), heads, dim, seed=6),
        "k": k,
        "v": v,
        "table": table,
    }


def flash(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, new: list[int], lengths: list[int],
    planned: bool = True, window: tuple[int, int] = (-1, -1), softcap: float = 0,
) -> Tensor:  # fmt: skip
    """vLLM's FlashAttention as its backend calls it, one split, its tiles planned beforehand."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    start = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    out = torch.empty_like(q)
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan = None
    if planned:
        plan = get_scheduler_metadata(
            batch_size=len(new), max_seqlen_q=max(new), max_seqlen_k=max(lengths),
            num_heads_q=q.shape[1], num_heads_kv=k.shape[2], headdim=q.shape[2],
            cache_seqlens=used, qkv_dtype=q.dtype, cu_seqlens_q=start, page_size=k.shape[1],
            causal=True, window_size=window, num_splits=1,
        )  # fmt: skip
    flash_attn_varlen_func(
        q=q, k=k, v=v, out=out, cu_seqlens_q=start, max_seqlen_q=max(new),
        seqused_k=used,
        max_seqlen_k=max(lengths), softmax_scale=q.shape[-1] ** -0.5, causal=True,
        window_size=list(window), block_table=table, fa_version=get_flash_attn_version(),
        num_splits=1, scheduler_metadata=plan, softcap=softcap,
    )  # fmt: skip
    return out


def check_attention() -> None:
    """A position's bits in a whole prompt, in a chunk, as a decode, alone and with neighbours: for
    two shapes of heads and for every one that was loaded.
    """
    known = [(16, 8, 128, (-1, -1), 0), (32, 4, 128, (-1, -1), 0)]
    for heads, kv_heads, dim, window, softcap in dict.fromkeys([*known, *loaded("attention")]):
        run = partial(flash, window=window, softcap=softcap or 0)
        _attention(run, heads, kv_heads, dim, planned=window == (-1, -1))


def _attention(
    flash: Callable[..., Tensor], heads: int, kv_heads: int, dim: int, planned: bool
) -> None:  # fmt: skip
    contexts = [1500, 300, 64, 17, 777, 3, 90, 129, 33, 5]
    d = paged(contexts, heads, kv_heads, dim)
    q, k, v, table = d["q"], d["k"], d["v"], d["table"]
    op, label = "vllm.Attention", f"{heads} heads of {dim}, {kv_heads} of keys"
    whole = flash(q, k, v, table, contexts, contexts, planned)
    if planned:
        unplanned = flash(q, k, v, table, contexts, contexts, False)
        same(op, f"{label}, planned or not", unplanned, whole)
    ends = torch.tensor(contexts).cumsum(0).tolist()
    companies = [[(s, n, n)] for s, n in enumerate(contexts)]  # prompts alone
    companies += [[(s, n, 1)] for s, n in enumerate(contexts)]  # decodes alone
    companies.append([(s, n, 1) for s, n in enumerate(contexts)])
    pick = random.Random(1)
    for _ in range(24):  # chunks and decodes of any positions together
        of = pick.sample(range(len(contexts)), pick.randint(1, len(contexts)))
        stops = [pick.randint(1, contexts[s]) for s in of]
        news = [min(stop, pick.choice((1, 1, 7, 60, stop))) for stop in stops]
        companies.append(list(zip(of, stops, news, strict=True)))
    for company in companies:
        of, stops, news = map(list, zip(*company, strict=True))
        begins = [ends[s] - contexts[s] + stop - new for s, stop, new in company]
        rows = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, news, strict=True)])
        case = f"{label}, (sequence, positions, of them new) {company}"
        got = flash(q[rows.cuda()], k, v, table[of], news, stops, planned)
        same(op, case, got, whole[rows.cuda()])


def check_moe() -> None:
    """Each token's experts alone and among others, at every tile that M can choose."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.experts import triton_moe  # noqa: F401

    from ops.kernels.triton.moe import sum_slots

    experts, hidden, inner, slots = 128, 1024, 768, 8
    w13 = _randn(experts, 2 * inner, hidden, seed=7, scale=0.03)
    x = _randn(2048, hidden, seed=8)
    scores = _randn(2048, experts, seed=9, dtype=torch.float32)
    ids = scores.topk(slots, dim=-1).indices.int()

    def product(rows: slice) -> Tensor:
        from vllm.triton_utils import tl

        m = x[rows].shape[0]
        tile = moe_tile(tuple(w13.shape), (experts, hidden, inner), slots, None, m)
        sorted_ids, owner, used = fused_moe.moe_align_block_size(
            ids[rows], tile["BLOCK_SIZE_M"], experts, None
        )
        out = torch.empty((m, slots, 2 * inner), dtype=x.dtype, device="cuda")
        fused_moe.invoke_fused_moe_triton_kernel(
            x[rows], w13, out, None, None, None, sorted_ids, owner, used, False, slots, tile,
            compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False,
            use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False, block_shape=None,
        )  # fmt: skip
        return out

    want = product(slice(0, 2048))
    for rows in (1, 2, 4, 8, 16, 24, 33, 48, 64, 96, 128, 256, 512, 1024):
        got = product(slice(2048 - rows, 2048))
        same("vllm.FusedMoE", f"{rows} tokens", got, want[2048 - rows :])
        same("vllm.FusedMoE", f"sum, {rows} tokens", sum_slots(got), sum_slots(want)[2048 - rows :])


def must_differ(op: str, case: str, got: Tensor, want: Tensor) -> None:
    """A planted fault that the comparison has to see; `NotInvariant` if it does not."""
    try:
        same(op, case, got, want)
    except NotInvariant:
        return
    raise NotInvariant(f"{op}: {case}: a planted fault was not seen, so the check proves nothing")
