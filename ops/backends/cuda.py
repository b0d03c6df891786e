"""NVIDIA's table: every op that is ours, by which kernel, and who owns it.

Measured on an H200 (docs/gpu.md): where vLLM's kernel was as fast and its bits were proven, vLLM
owns the op and the row adds the guard and the proof. `tiles` hold what fixes an order, not what
was tuned: tuned tiles change no bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ops import bindings_cuda as bind
from ops import bindings_cuda_check as checks
from ops.registry import Override

_CHAIN = {"split_k": 1, "chain_k": 16, "accumulator": "float32"}


def rows() -> list[Override]:
    """All override rows of CUDA, in the order in which they are installed."""
    from ops import sampling_hook as hook

    draw = replace(hook.OVERRIDE, install=hook.install_both, installed=hook.both_installed)
    return [*_aten(), *_layers(), draw]


def kernels() -> tuple[str, str]:
    """(name, reason) of the kernels in force, for the log and the report."""
    return "cuda", "cuBLASLt pinned and proven equal to Triton; Triton; FlashAttention 3, one split"


def _aten() -> list[Override]:
    return [
        Override(
            op=f"aten::{name}",
            kernel="triton:bmm" if name in ("mm", "bmm", "addmm") else f"triton:{name.strip('_')}",
            reason="the library picks tiles, splits and vector loops by the shape",
            install=bind.install_aten if name == "mm" else _nothing,
            installed=bind.aten_installed,
            check=partial(checks.check_aten, name),
            tiles=_CHAIN if name in ("mm", "bmm", "addmm") else {},
        )
        for name in bind.ATEN
    ]


def _nothing() -> None:
    """The net is bound whole, by its first row."""


def _layers() -> list[Override]:
    return [
        Override(
            op="vllm.UnquantizedLinearMethod",
            kernel="cublaslt:pinned, bits of triton:linear",
            reason="cuBLAS splits K by the number of rows",
            install=bind.install_linear,
            installed=bind.linear_installed,
            check=checks.check_linear,
            tiles=_CHAIN,
        ),
        Override(
            op="vllm.RMSNorm",
            kernel="triton:rms_norm",
            reason="vLLM's block changes at 256 rows; Inductor's is picked by a race at the start",
            install=bind.install_norms,
            installed=bind.norms_installed,
            check=checks.check_norm,
        ),
        Override(
            op="vllm.Attention",
            kernel="vllm:FlashAttention 3",
            reason="splits of the keys follow the batch; one split does not",
            install=bind.install_attention,
            installed=bind.attention_installed,
            check=checks.check_attention,
            tiles={"num_splits": 1},
        ),
        Override(
            op="vllm.FusedMoE",
            kernel="vllm:fused_moe_kernel + triton:sum_slots",
            reason="torch's sum over the slots picks its order by the number of rows",
            install=bind.install_moe,
            installed=bind.moe_installed,
            check=checks.check_moe,
            tiles=_CHAIN,
        ),
    ]
