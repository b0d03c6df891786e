"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch

from ops.kernels.cpu import load
from ops.registry import Override


def rows() -> list[Override]:
    """The override row of RotaryEmbedding and of the subclasses that only change its table."""
    from ops import selfcheck

    kernels = load()
    return [
        Override(
            op="vllm.RotaryEmbedding",
            kernel=f"{kernels.name}:rotary",
            reason="one kernel for every batch: each head of each token is rotated by itself",
            install=_install,
            installed=_installed,
            check=selfcheck.check("vllm.RotaryEmbedding"),
        )
    ]


def _install() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary = load().rotary

    def forward(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = self.cos_sin_cache
        if cache.dtype != query.dtype:
            cache = self._match_cos_sin_cache_dtype(query)
        rotary(positions, query, key, cache, self.head_size, self.rotary_dim, self.is_neox_style)
        return query, key

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return forward(self, positions, query, key)

    forward.samebits = True  # type: ignore[attr-defined]
    # `forward` skips a call per layer; a subclass with its own forward keeps it, and the recorder
    # judges its ops.
    RotaryEmbedding.forward = forward
    RotaryEmbedding.forward_cpu = forward_cpu


def _installed() -> bool:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return getattr(RotaryEmbedding.forward, "samebits", False)
