"""CPU meanings of the NPU operations that dense and MoE Qwen3 models call, counted by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from samebits_standin.device import KEY, device, host

calls: Counter[str] = Counter()
_libraries: list[torch.library.Library] = []


def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, with its calls counted under `name`; appended to STANDIN_COUNTS on the way."""
    path = os.environ.get("STANDIN_COUNTS")

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if path and calls[name] in (1, 10, 100, 1000):
            with open(path, "a") as counts:
                counts.write(f"{os.getpid()} {name} {calls[name]}\n")
        return kernel(*args, **kwargs)

    return run


def rms_norm(x: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    values = host(x).float()
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    y = (values * scale * host(gamma).float()).to(x.dtype).contiguous()
    return device(y, x.device), device(scale, x.device)


def add_rms_norm(a: Any, b: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[torch.Tensor, ...]:
    total = device(host(a) + host(b), a.device)
    return (*rms_norm(total, gamma, epsilon), total)


def swiglu(x: Any, dim: int = -1) -> torch.Tensor:
    gate, up = host(x).float().chunk(2, dim)
    y = torch.nn.functional.silu(gate) * up
    return device(y.to(x.dtype).contiguous(), x.device)


def rotary(positions: Any, q: Any, k: Any, head_size: int, table: Any, neox: bool) -> None:
    cos, sin = host(table)[host(positions).flatten()].float().chunk(2, -1)
    for heads in (host(q), host(k)):
        split = heads.reshape(heads.shape[0], -1, head_size).float()
        a, b = split.chunk(2, -1)
        turned = torch.cat(
            (a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1
        )
        heads.copy_(turned.reshape(heads.shape).to(heads.dtype))


def reshape_and_cache(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    where = host(slots).flatten().long()
    used = where >= 0
    for new, cache in ((host(key), host(key_cache)), (host(value), host(value_cache))):
        rows = cache.view(-1, *cache.shape[2:])
        rows[where[used]] = new.reshape(-1, *cache.shape[2:])[: len(where)][used].to(cache.dtype)


def fused_infer_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    atten_mask: Any = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    block_table: Any = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, so the stand-in itself depends on nothing but the row."""
    assert input_layout == "TND", input_layout
    q, keys, values = host(query).float(), host(key), host(value)
    out = torch.zeros_like(q)
    table = None if block_table is None else host(block_table)
    start, dense = 0, 0
    for i, end in enumerate(actual_seq_lengths):
        if end <= start:
            continue
        total = int(actual_seq_lengths_kv[i])
        if table is None:
            k, v = keys[dense:total], values[dense:total]
            dense = total
        else:
            blocks = table[i, : -(-total // block_size)].long()
            shape = (-1, num_key_value_heads, q.shape[-1])
            k, v = keys[blocks].reshape(shape)[:total], values[blocks].reshape(shape)[:total]
        k = k.float().repeat_interleave(num_heads // num_key_value_heads, 1)
        v = v.float().repeat_interleave(num_heads // num_key_value_heads, 1)
        for row in range(start, end):
            seen = len(k) - (end - row) + 1 if sparse_mode == 3 else len(k)
            weights = torch.softmax((k[:seen] * q[row][None]).sum(-1) * scale, 0)
            out[row] = (weights[..., None] * v[:seen]).sum(0)
        start = end
    return device(out.to(query.dtype), query.device), torch.empty(0, device=query.device)


def grouped_matmul(x: list[Any], weight: list[Any], **kwargs: Any) -> list[torch.Tensor]:
    """One group of rows per expert, `group_list` as counts (type 1) or running ends (type 0)."""
    rows, weights = host(x[0]), host(weight[0])
    sizes = host(kwargs["group_list"]).tolist()
    if kwargs.get("group_list_type", 0) == 0:
        sizes = [b - a for a, b in zip([0, *sizes], sizes, strict=False)]
    out = rows.new_zeros(rows.shape[0], weights.shape[-1])
    at = 0
    for expert, size in enumerate(sizes):
        for row in range(at, at + int(size)):
            out[row] = rows[row] @ weights[expert]
        at += int(size)
    return [device(out, x[0].device)]


def matmul_add(x: Any, weight: Any, c: Any) -> None:
    host(c).add_(host(x).float().t() @ host(weight).float())


def install() -> None:
    """Register all of them on the stand-in device."""
    npu = torch.library.Library("npu", "IMPL")
    _libraries.append(npu)
    for name, kernel in {
        "npu_rms_norm": rms_norm,
        "npu_add_rms_norm": add_rms_norm,
        "npu_swiglu": swiglu,
        "npu_fused_infer_attention_score": fused_infer_attention,
        "npu_grouped_matmul": grouped_matmul,
        "npu_grouped_matmul.List": grouped_matmul,
    }.items():
        try:
            npu.impl(name, counted(name, kernel), KEY)
        except RuntimeError as fault:
            if "grouped_matmul" not in name:
                raise
            calls[f"absent {name}: {fault}"] += 1
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    _register_atb_extensions()
    atb = torch.library.Library("atb", "IMPL")
    _libraries.append(atb)
    for name, kernel in {
        "_npu_rotary_embedding": rotary,
        "_npu_reshape_and_cache": reshape_and_cache,
        "_npu_matmul_add_fp32": matmul_add,
    }.items():
        atb.impl(name, counted(name, kernel), KEY)
