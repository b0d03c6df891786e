"""Unquantized linear layers, the LM head and embeddings."""

from __future__ import annotations

from typing import Any

import torch

from ops.kernels.cpu import load
from ops.registry import NotInstalled, Override


def rows() -> list[Override]:
    """Override rows for linear layers and embeddings."""
    from ops import selfcheck

    kernels = load()
    return [
        Override(
            op="vllm.UnquantizedLinearMethod",
            kernel=f"{kernels.name}:linear",
            reason="BLAS picks tiles, and so the order along K, by the number of rows",
            install=_install_linear,
            installed=_linear_is_ours,
            check=selfcheck.check("vllm.UnquantizedLinearMethod"),
            tiles=kernel_tiles("linear"),
        ),
        Override(
            op="vllm.UnquantizedEmbeddingMethod",
            kernel=f"{kernels.name}:linear",
            reason="the LM head is a linear layer; tied embeddings share its one packed copy",
            install=_install_embedding,
            installed=_embedding_is_ours,
            check=selfcheck.check("vllm.UnquantizedEmbeddingMethod"),
            tiles=kernel_tiles("linear"),
        ),
    ]


def kernel_tiles(name: str) -> dict[str, int | str]:
    """The numbers that fix a kernel's order, if the loaded kernels publish them."""
    tiles = getattr(load(), "tiles", None)
    found = tiles.get(name, {}) if isinstance(tiles, dict) else {}
    return dict(found)


def _install_linear() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    kernels = load()
    linear = kernels.linear

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        weight = layer.weight
        if weight.is_meta:
            return
        if weight.ndim != 2:
            raise NotInstalled(
                f"{type(layer).__name__}: weight {tuple(weight.shape)} is no matrix; no proven "
                f"kernel"
            )
        layer.samebits_packed = kernels.pack_weight(weight.data)
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def apply(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.samebits_packed, bias)

    apply.samebits = True  # type: ignore[attr-defined]
    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
    UnquantizedLinearMethod.apply = apply


def _linear_is_ours() -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return getattr(UnquantizedLinearMethod.apply, "samebits", False)


def _install_embedding() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    kernels = load()
    linear, take_rows = kernels.linear, kernels.take_rows

    def packed_of(layer: Any) -> Any:
        """Pack on first use as a matrix, on the Parameter itself: tied layers share it, and so its
        one copy.
        """
        weight = layer.weight
        packed = getattr(weight, "samebits_packed", None)
        if packed is None:
            packed = weight.samebits_packed = kernels.pack_weight(weight.data)
            weight.data = torch.empty(0, dtype=weight.dtype)
        return packed

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if isinstance(layer, ParallelLMHead) and not layer.weight.is_meta:
            packed_of(layer)

    def apply(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, packed_of(layer), bias)

    def embedding(self: Any, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        packed = getattr(layer.weight, "samebits_packed", None)
        if packed is None:  # never multiplied so far: still a plain table
            return torch.nn.functional.embedding(input_, layer.weight)
        return take_rows(packed, input_)

    apply.samebits = True  # type: ignore[attr-defined]
    embedding.samebits = True  # type: ignore[attr-defined]
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading
    UnquantizedEmbeddingMethod.apply = apply
    UnquantizedEmbeddingMethod.embedding = embedding


def _embedding_is_ours() -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod as method,
    )

    return all(getattr(f, "samebits", False) for f in (method.apply, method.embedding))
