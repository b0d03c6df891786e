"""Mixture of experts: routing, and the experts' products, one kernel for any number of rows."""

from __future__ import annotations

from typing import Any

import torch

from ops.bindings.linear import kernel_tiles
from ops.kernels.cpu import load
from ops.registry import NotInstalled, Override

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def rows() -> list[Override]:
    """The override row of the fused MoE layer."""
    from ops import selfcheck

    kernels = load()
    return [
        Override(
            op="vllm.UnquantizedFusedMoEMethod",
            kernel=f"{kernels.name}:moe",
            reason="rows are grouped by expert, so each product's shape depends on the other rows",
            install=_install,
            installed=_installed,
            check=selfcheck.check("vllm.UnquantizedFusedMoEMethod"),
            tiles=kernel_tiles("moe"),
        )
    ]


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax routing: weights [M, k] fp32 and ids [M, k], most likely expert first, equal ones by
    lower id.

    With `renormalize` the k probabilities are divided by their sum, added in slot order.
    """
    kernels = load()
    probabilities = kernels.softmax(logits.float())
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, order)
    if renormalize:
        total = weights[:, 0]
        for slot in range(1, top_k):
            total = total + weights[:, slot]
        weights = weights / total.unsqueeze(1)
    return weights, order.to(torch.int32)


def experts(
    kernels: Any,
    x: torch.Tensor,
    layer: Any,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """[M, H] -> [M, H]: sum over slots s, in slot order and fp32, of weights[m, s] · expert(ids[m,
    s], x[m]).

    Rows are gathered by expert; each product is a linear layer, whose rows don't see each other.
    Gate-up, activation and down products are rounded to x's type, as between layers.
    """
    w13_bias, w2_bias = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
    slots = ids.shape[1]
    parts = torch.empty(x.shape[0], slots, x.shape[1], dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows_, slot = torch.nonzero(ids == expert, as_tuple=True)
        up = kernels.linear(
            x[rows_], layer.samebits_w13[expert], None if w13_bias is None else w13_bias[expert]
        )
        mixed = kernels.act_and_mul(up, activation)
        down = kernels.linear(
            mixed, layer.samebits_w2[expert], None if w2_bias is None else w2_bias[expert]
        )
        parts[rows_, slot] = down.float() * weights[rows_, slot].unsqueeze(1)
    total = parts[:, 0]
    for s in range(1, slots):
        total = total + parts[:, s]
    return total.to(x.dtype)


def _install() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as method,
    )

    kernels = load()

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight")
            packed = [kernels.pack_weight(expert) for expert in weight.data]
            setattr(layer, f"samebits_{name}", packed)
            setattr(
                layer,
                f"{name}_weight",
                torch.nn.Parameter(weight.data.new_empty(0), requires_grad=False),
            )

    def apply_monolithic(
        self: Any, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: Any = None
    ) -> torch.Tensor:
        _refuse_unproven(layer)
        weights, ids = route(router_logits, layer.top_k, layer.renormalize)
        return experts(kernels, x, layer, weights, ids, _ACTIVATIONS[layer.activation.value])

    apply_monolithic.samebits = True  # type: ignore[attr-defined]
    method.process_weights_after_loading = process_weights_after_loading
    method.apply_monolithic = apply_monolithic


def _refuse_unproven(layer: Any) -> None:
    faults = []
    if layer.use_grouped_topk:
        faults.append("grouped top-k")
    if layer.custom_routing_function is not None:
        faults.append("a routing function of its own")
    if layer.scoring_func != "softmax":
        faults.append(f"scoring_func={layer.scoring_func}")
    if layer.e_score_correction_bias is not None:
        faults.append("a score correction bias")
    if layer.apply_router_weight_on_input:
        faults.append("router weights on the input")
    if layer.expert_map is not None:
        faults.append("expert parallelism")
    if layer.routed_scaling_factor not in (None, 1.0):
        faults.append(f"routed_scaling_factor={layer.routed_scaling_factor}")
    if layer.activation.value not in _ACTIVATIONS:
        faults.append(f"activation {layer.activation.value}")
    if faults:
        raise NotInstalled(
            f"vllm.UnquantizedFusedMoEMethod: {', '.join(faults)}: no proven kernel on the CPU"
        )


def _installed() -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as method,
    )

    return getattr(method.apply_monolithic, "samebits", False)
