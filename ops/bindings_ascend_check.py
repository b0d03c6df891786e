"""The start's self-check on an NPU: each bound op on one row and on many, at several positions, and
again; equal bit for bit, or `NotInvariant`. Called as models call it, through torch and torch_npu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.registry import NotInvariant
from ops.selfcheck import same

SIZES = (1, 2, 7, 16, 33, 64)
"""Rows of the short check; `ops/hardware_check.py` runs the long one."""

Run = Callable[[Tensor], Tensor]


def device() -> torch.device:
    """Where checks run: the NPU that this worker chose."""
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]


def draw(
    *shape: int, std: float = 1.0, seed: int = 11, dtype: torch.dtype = torch.float16
) -> Tensor:
    """Values known to every rank, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(dtype).to(device())


def rowwise(op: str, run: Run, x: Tensor, sizes: Sequence[int] = SIZES) -> None:
    """Row r of run(x) must not change with the rows around it. Raises `NotInvariant`."""
    whole = run(x).cpu()
    for m in sizes:
        same(op, f"first {m} of {len(x)} rows", run(x[:m].contiguous()).cpu(), whole[:m])
    for r in (1, len(x) // 2, len(x) - 1):
        same(op, f"row {r} alone", run(x[r : r + 1].contiguous()).cpu(), whole[r : r + 1])
    middle = slice(len(x) // 3, 2 * len(x) // 3)
    same(op, "a middle third", run(x[middle].contiguous()).cpu(), whole[middle])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    same(op, "in another order", run(x[order.to(x.device)]).cpu(), whole[order])
    same(op, "again", run(x).cpu(), whole)


def aten_runs(width: int, columns: int, dtype: torch.dtype) -> dict[str, Run]:
    """Each op of the table as a function of rows, called through torch."""
    weight = draw(columns, width, std=0.03, seed=1, dtype=dtype)
    bias = draw(columns, seed=2, dtype=dtype)
    return {
        "mm": lambda x: torch.mm(x, weight.t()),
        "matmul": lambda x: torch.matmul(x, weight.t()),
        "linear": lambda x: torch.nn.functional.linear(x, weight, bias),
        "addmm": lambda x: torch.addmm(bias, x, weight.t()),
        "bmm": lambda x: torch.bmm(x[None], weight.t()[None])[0],
        "baddbmm": lambda x: torch.baddbmm(bias, x[None], weight.t()[None])[0],
        "_softmax": lambda x: torch._softmax(x, -1, False),
        "softmax.int": lambda x: torch.softmax(x, -1),
        "_log_softmax": lambda x: torch._log_softmax(x, -1, False),
        "log_softmax.int": lambda x: torch.log_softmax(x, -1),
        "sum": lambda x: torch.stack([row.sum() for row in x]),
        "sum.dim_IntList": lambda x: x.sum(-1),
        "mean": lambda x: torch.stack([row.mean() for row in x]),
        "mean.dim": lambda x: x.mean(-1),
    }


def check_aten(name: str, sizes: Sequence[int] = SIZES) -> None:
    """One of torch's ops, at the sizes of the start's check."""
    long_aten(name, sizes, 192, 96, torch.float16)


def long_aten(
    name: str, sizes: Sequence[int], width: int, columns: int, dtype: torch.dtype
) -> None:
    """One of torch's ops on up to max(sizes) rows of one width."""
    rows = min(8, max(sizes)) if name in ("sum", "mean") else max(sizes)
    x = draw(rows, width, dtype=dtype)
    run = aten_runs(width, columns, dtype)[name]
    rowwise(f"aten::{name}", run, x, [m for m in sizes if m <= rows])


def check_function(name: str, sizes: Sequence[int] = SIZES) -> None:
    """One of torch_npu's functions: a norm, with its residual, or the activation."""
    import torch_npu

    gamma = draw(192, seed=2)

    def run(both: Tensor) -> Tensor:
        x, r = both[:, :192].contiguous(), both[:, 192:].contiguous()
        if name == "npu_swiglu":
            out: Tensor = torch_npu.npu_swiglu(both)
            return out
        if name == "npu_rms_norm":
            out = torch_npu.npu_rms_norm(x, gamma, 1e-6)[0]
            return out
        y, _, total = torch_npu.npu_add_rms_norm(x, r, gamma, 1e-6)
        return torch.cat((y, total), 1)

    rowwise(f"torch_npu.{name}", run, draw(max(sizes), 384), sizes)


def check_rotary(sizes: Sequence[int] = SIZES) -> None:
    """Both styles, with a part of the head that is not turned."""
    from ops import bindings_ascend as bind

    table = draw(512, 48, seed=3).float()
    for neox in (True, False):

        def run(both: Tensor, neox: bool = neox) -> Tensor:
            at = both[:, -1].float().abs().mul(100).long() % len(table)
            return bind.rotary(both[:, :-1].contiguous(), table[at], 64, 48, neox)

        rowwise("vllm_ascend.AscendRotaryEmbedding", run, draw(max(sizes), 257), sizes)


def check_moe(sizes: Sequence[int] = SIZES) -> None:
    """Routing, experts and their sum, beside rows that choose other experts."""
    from ops import bindings_ascend as bind
    from ops.backends.ascend import EXPERTS
    from ops.kernels.triton.moe import moe

    w13, w2 = draw(6, 64, 96, std=0.1, seed=5), draw(6, 96, 32, std=0.1, seed=6)

    def run(both: Tensor) -> Tensor:
        x, logits = both[:, :96].contiguous(), both[:, 96:].contiguous()
        weights, ids = bind.route(logits, 2, True)
        return moe(x, w13, w2, weights, ids, tile=bind._tile(EXPERTS))

    rowwise("vllm_ascend.AscendUnquantizedFusedMoEMethod", run, draw(max(sizes), 102), sizes)


def check_attention() -> None:
    """A prompt alone and between others, dense; a decode row alone and among others, paged."""
    lengths = (5, 33, 17, 1)
    op = "torch_npu.npu_fused_infer_attention_score"
    heads, kv_heads, size, block = 4, 2, 64, 128
    total = sum(lengths)
    q = draw(total, heads, size, seed=7)
    k, v = draw(total, kv_heads, size, seed=8), draw(total, kv_heads, size, seed=9)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    together = _attend(q, k, v, ends, ends, heads, kv_heads).cpu()
    for start, end in zip(starts, ends, strict=True):
        part = slice(start, end)
        alone = _attend(q[part], k[part], v[part], [end - start], [end - start], heads, kv_heads)
        same(op, f"a prompt of {end - start} tokens alone", alone.cpu(), together[part])
    keys = draw(len(lengths), block, kv_heads * size, seed=8)
    values = draw(len(lengths), block, kv_heads * size, seed=9)
    table = torch.arange(len(lengths), dtype=torch.int32, device=q.device)[:, None]
    rows = q[: len(lengths)].contiguous()
    paged: dict[str, Any] = {"block_table": table, "block_size": block}
    steps = list(range(1, len(lengths) + 1))
    many = _attend(rows, keys, values, steps, list(lengths), heads, kv_heads, **paged).cpu()
    for i, length in enumerate(lengths):
        paged["block_table"] = table[i : i + 1].contiguous()
        one = _attend(rows[i : i + 1], keys, values, [1], [length], heads, kv_heads, **paged)
        same(op, f"a decode row over {length} keys alone", one.cpu(), many[i : i + 1])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ends: list[int], lengths: list[int], heads: int, kv_heads: int,
    **paged: Any,
) -> Tensor:  # fmt: skip
    import torch_npu

    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), diagonal=1).to(q.device)
    out = torch_npu.npu_fused_infer_attention_score(
        query=q.contiguous(),
        key=k.contiguous(),
        value=v.contiguous(),
        atten_mask=mask,
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=lengths,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=q.shape[-1] ** -0.5,
        input_layout="TND",
        sparse_mode=3,
        **paged,
    )
    found: Tensor = out[0]
    if found.isnan().any():
        raise NotInvariant("torch_npu.npu_fused_infer_attention_score: not a number")
    return found
