"""Whole decoder layers in one call, where the native kernels are and the layer is a plain one.

Llama, Qwen2 and Qwen3 layers (pre-norm, gated MLP) are ten calls of kernels of ours; the kernel
`decoder_layer` makes the same calls from C, so it gives the same bits and saves what Python costs
between them. A layer that is anything else keeps its own forward, op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.kernels.cpu import load
from ops.registry import NotInvariant, Override

_LAYERS = (
    ("vllm.model_executor.models.llama", "LlamaDecoderLayer"),
    ("vllm.model_executor.models.qwen2", "Qwen2DecoderLayer"),
    ("vllm.model_executor.models.qwen3", "Qwen3DecoderLayer"),
)


def rows() -> list[Override]:
    """The override row of decoder layers; none where the kernels have no such call."""
    kernels = load()
    if not hasattr(kernels, "decoder_layer"):
        return []
    return [
        Override(
            op="vllm.DecoderLayer",
            kernel=f"{kernels.name}:decoder_layer",
            reason="the same kernels called from C: what Python costs between them goes",
            install=_install,
            installed=_installed,
            check=_check,
        )
    ]


def _classes() -> list[Any]:
    import importlib

    return [getattr(importlib.import_module(module), name) for module, name in _LAYERS]


def _install() -> None:
    from vllm.forward_context import get_forward_context

    decoder_layer = load().decoder_layer

    def wrap(stepwise: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            self: Any,
            positions: torch.Tensor,
            hidden_states: torch.Tensor,
            residual: torch.Tensor | None,
        ) -> Any:
            plan = self.__dict__.get("samebits_plan", 0)
            if plan == 0:
                plan = self.__dict__["samebits_plan"] = _plan(self)
            metadata = get_forward_context().attn_metadata
            if plan is None or not metadata or positions.dim() != 1:
                return stepwise(self, positions, hidden_states, residual)
            layer = self.self_attn.attn
            step = metadata[layer.layer_name]
            return decoder_layer(
                plan,
                hidden_states,
                residual,
                positions,
                layer.kv_cache,
                step.block_table,
                step.query_start_loc,
                step.seq_lens,
                step.slot_mapping[: step.num_tokens],
            )

        forward.samebits = True  # type: ignore[attr-defined]
        return forward

    for cls in _classes():
        cls.forward = wrap(cls.forward)


def _installed() -> bool:
    return all(getattr(cls.forward, "samebits", False) for cls in _classes())


def _plan(layer: Any) -> Any:
    """The layer as a plan for the kernel, or None if any part of it is not the plain one."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from ops.bindings.attention import PagedAttentionImpl

    attn, mlp = layer.self_attn, layer.mlp
    linears = [
        attn.qkv_proj,
        attn.o_proj,
        getattr(mlp, "gate_up_proj", None),
        getattr(mlp, "down_proj", None),
    ]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = [getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)]
    rotary, impl = attn.rotary_emb, attn.attn.impl
    plain = (
        all(hasattr(part, "samebits_packed") for part in linears)
        and all(type(n) is RMSNorm and n.variance_size_override is None for n in norms)
        and all(n is None or type(n) is RMSNorm for n in heads)
        and len({n.variance_epsilon for n in [*norms, *heads] if n is not None}) == 1
        and type(mlp.act_fn) is SiluAndMul
        and type(rotary).forward is RotaryEmbedding.forward
        and isinstance(impl, PagedAttentionImpl)
        and impl.kv_sharing_target_layer_name is None
        and getattr(attn, "tp_size", 1) == 1
        and getattr(linears[1], "tp_size", 1) == 1
        and not getattr(attn, "do_llama_4_scaling", False)
        and not getattr(attn, "dual_chunk_attention_config", None)
    )
    if not plain:
        return None
    dtype = linears[0].samebits_packed.dtype
    cache = rotary.cos_sin_cache
    cache = cache if cache.dtype == dtype else cache.to(dtype)
    return load().layer_plan(
        qkv=linears[0].samebits_packed,
        o=linears[1].samebits_packed,
        gate_up=linears[2].samebits_packed,
        down=linears[3].samebits_packed,
        qkv_bias=linears[0].bias,
        o_bias=linears[1].bias,
        gate_up_bias=linears[2].bias,
        down_bias=linears[3].bias,
        input_norm=norms[0].weight,
        post_norm=norms[1].weight,
        q_norm=None if heads[0] is None else heads[0].weight,
        k_norm=None if heads[1] is None else heads[1].weight,
        eps=norms[0].variance_epsilon,
        q_heads=attn.num_heads,
        kv_heads=attn.num_kv_heads,
        head_size=attn.head_dim,
        scale=impl.scale,
        activation="silu",
        cos_sin_cache=cache,
        rotary_dim=rotary.rotary_dim,
        is_neox=rotary.is_neox_style,
        **impl.options,
    )


def _check() -> None:
    """A small layer on three sequences together, and on each alone: the rows must be equal."""
    lengths = (33, 5, 1)
    together = _run(lengths)
    for number, length in enumerate(lengths):
        alone = _run(tuple(n if i == number else 0 for i, n in enumerate(lengths)))
        begin = sum(lengths[:number])
        for name, got, want in zip(("hidden", "residual"), alone, together, strict=True):
            rows = want[begin : begin + length]
            if not torch.equal(got, rows):
                at = int((got != rows).flatten().nonzero()[0])
                raise NotInvariant(
                    f"vllm.DecoderLayer: {name} of sequence {number} ({length} tokens) alone and "
                    f"among {len(lengths)}: first difference at element {at}"
                )


def _run(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a fixed random layer (H 64, 4 heads, 2 of KV, 16 each) over whole prompts."""
    kernels, generator = load(), torch.Generator().manual_seed(0)

    def random(*shape: int, std: float = 0.04) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    one = torch.ones(64)
    plan = kernels.layer_plan(
        qkv=kernels.pack_weight(random(128, 64)),
        o=kernels.pack_weight(random(64, 64)),
        gate_up=kernels.pack_weight(random(192, 64)),
        down=kernels.pack_weight(random(64, 96)),
        input_norm=one,
        post_norm=one,
        eps=1e-5,
        q_heads=4,
        kv_heads=2,
        head_size=16,
        scale=0.25,
        activation="silu",
        cos_sin_cache=random(64, 16, std=1.0),
        rotary_dim=16,
    )
    whole = random(64, 3, 64, std=1.0)  # position, sequence, hidden
    kept = [i for i, n in enumerate(lengths) if n]
    hidden = torch.cat([whole[: lengths[i], i] for i in kept])
    positions = torch.cat([torch.arange(lengths[i]) for i in kept])
    blocks = torch.tensor([[3 * i, 3 * i + 1, 3 * i + 2] for i in kept], dtype=torch.int32)
    slots = torch.cat([48 * i + torch.arange(lengths[i]) for i in kept])
    ends = torch.tensor([lengths[i] for i in kept], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends.cumsum(0, dtype=torch.int32)])
    cache = torch.zeros(9, 2, 16, 32)
    found: tuple[torch.Tensor, torch.Tensor] = kernels.decoder_layer(
        plan, hidden, None, positions, cache, blocks, starts, ends, slots
    )
    return found
