"""RMS norms of every kind that vLLM's decoder models use."""

from __future__ import annotations

from typing import Any

import torch

from ops.bindings.linear import kernel_tiles
from ops.kernels.cpu import load
from ops.registry import NotInstalled, Override


def rows() -> list[Override]:
    """Override rows for RMSNorm and Gemma's RMSNorm."""
    from ops import selfcheck

    kernels = load()
    reason = "the block, and so the order of the sum of squares, changes with the number of rows"
    return [
        Override(
            op=f"vllm.{name}",
            kernel=f"{kernels.name}:rms_norm",
            reason=reason,
            install=install,
            installed=installed,
            check=selfcheck.check(f"vllm.{name}"),
            tiles=kernel_tiles("rms_norm"),
        )
        for name, install, installed in (
            ("RMSNorm", _install_rms, lambda: _is_ours("RMSNorm")),
            ("GemmaRMSNorm", _install_gemma, lambda: _is_ours("GemmaRMSNorm")),
        )
    ]


def _install_rms() -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    kernels = load()
    rms_norm, fused_add = kernels.rms_norm, kernels.fused_add_rms_norm

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if self.variance_size_override is not None:
            raise NotInstalled("vllm.RMSNorm with var_hidden_size: no proven kernel")
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return fused_add(x, residual, self.weight, self.variance_epsilon)

    forward.samebits = True  # type: ignore[attr-defined]
    RMSNorm.forward = forward


def _install_gemma() -> None:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    kernels = load()
    rms_norm, fused_add = kernels.rms_norm, kernels.fused_add_rms_norm

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon, weight_offset=1.0)
        return fused_add(x, residual, self.weight, self.variance_epsilon, weight_offset=1.0)

    forward.samebits = True  # type: ignore[attr-defined]
    GemmaRMSNorm.forward = forward


def _is_ours(name: str) -> bool:
    from vllm.model_executor.layers import layernorm

    return getattr(getattr(layernorm, name).forward, "samebits", False)
