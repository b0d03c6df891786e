"""Stands in for the AscendC package `batch_invariant_ops`: the same names and schemas, on the CPU,
row by row. Put this folder on the path, and the library is "present".

STANDIN_FAULT=owner registers one of torch's own ops, as a second owner would. STANDIN_FAULT=rank
makes the library missing in the worker of device 1 alone. STANDIN_FAULT=split makes the matrix
product cut K by the number of rows, as a kernel that is not batch invariant does: the planted fault
that the self-check has to catch.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from samebits_standin.device import KEY, device, host
from samebits_standin.ops import counted, fused_infer_attention

_define = torch.library.Library("batch_invariant_ops", "DEF")
_define.define("npu_mm_batch_invariant(Tensor a, Tensor b) -> Tensor")
_define.define("npu_matmul_batch_invariant(Tensor a, Tensor b) -> Tensor")
_define.define(
    "npu_reduce_sum_batch_invariant(Tensor x, int[]? dim=None, bool keepdim=False) -> Tensor"
)
_define.define(
    "npu_fused_infer_attention_score_batch_invariant(Tensor query, Tensor key, Tensor value, *,"
    " Tensor? atten_mask=None, int[]? actual_seq_lengths=None, int[]? actual_seq_lengths_kv=None,"
    " Tensor? block_table=None, int num_heads=1, float scale=1., str input_layout='BSH',"
    " int num_key_value_heads=0, int sparse_mode=0, int block_size=0) -> (Tensor, Tensor)"
)


def matmul(a: Any, b: Any) -> torch.Tensor:
    left, right = host(a), host(b).float()
    rows = left.reshape(-1, left.shape[-1]).float()
    if right.dim() == 3:
        out = torch.stack(
            [
                torch.stack([row @ m for row in rs])
                for rs, m in zip(left.float(), right, strict=True)
            ]
        )
        return device(out.to(left.dtype), a.device)
    if os.environ.get("STANDIN_FAULT") == "split":
        parts = 1 + min(7, len(rows) // 4)
        step = -(-rows.shape[-1] // parts)
        pieces = [slice(i, i + step) for i in range(0, rows.shape[-1], step)]
        out = sum((rows[:, p] @ right[p]).to(left.dtype) for p in pieces)
    else:
        out = torch.stack([row @ right for row in rows]) if len(rows) else rows @ right
    return device(out.to(left.dtype).reshape(*left.shape[:-1], right.shape[-1]), a.device)


def reduce_sum(x: Any, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    return device(host(x).sum(dim, keepdim), x.device)


for _name, _kernel in {
    "npu_mm_batch_invariant": matmul,
    "npu_matmul_batch_invariant": matmul,
    "npu_reduce_sum_batch_invariant": reduce_sum,
    "npu_fused_infer_attention_score_batch_invariant": fused_infer_attention,
}.items():
    _define.impl(_name, counted(_name, _kernel), KEY)

if os.environ.get("STANDIN_FAULT") == "owner":
    _second = torch.library.Library("aten", "IMPL")
    _second.impl("mm", matmul, "NPU")

if os.environ.get("STANDIN_FAULT") == "rank":
    _choose = torch.npu.set_device

    def set_device(where: Any) -> None:
        """As torch_npu's; and on the second device vllm-ascend finds no library."""
        _choose(where)
        if torch.npu.current_device() == 1:
            from vllm_ascend import batch_invariant

            batch_invariant.HAS_ASCENDC_BATCH_INVARIANT = False

    torch.npu.set_device = set_device
