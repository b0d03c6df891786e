"""Attention over the paged KV cache: our backend in vLLM's place on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ops.bindings.linear import kernel_tiles
from ops.kernels.cpu import load
from ops.registry import NotInstalled, Override

_PATH = "ops.bindings.attention.PagedAttention"


def rows() -> list[Override]:
    """The override row of attention."""
    from ops import selfcheck

    kernels = load()
    return [
        Override(
            op="vllm.Attention",
            kernel=f"{kernels.name}:attention",
            reason="vLLM's CPU kernel splits keys, and picks tiles, by what is scheduled together",
            install=_install,
            installed=_installed,
            check=selfcheck.check("vllm.Attention"),
            tiles=kernel_tiles("attention"),
        )
    ]


def _select(
    cls: type[CpuPlatform],
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    if attn_selector_config.use_mla:
        raise NotInstalled(
            "vllm.Attention: MLA has no proven kernel on the CPU (remedy: another model)"
        )
    if attn_selector_config.use_sparse:
        raise NotInstalled(
            "vllm.Attention: sparse attention has no proven kernel on the CPU (remedy: another "
            "model)"
        )
    return _PATH


def _install() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, _PATH)
    CpuPlatform.get_attn_backend_cls = classmethod(_select)


def _installed() -> bool:
    return CpuPlatform.get_attn_backend_cls.__func__ is _select


class PagedAttention(AttentionBackend):
    """vLLM's view of our kernels: any head size, blocks of 16 keys and multiples, decoder
    attention only.
    """

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return PagedMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


@dataclass
class PagedMetadata:
    """What one step's attention needs: all of it is about sequences, none about how the batch was
    put together.
    """

    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PagedMetadataBuilder(AttentionMetadataBuilder):
    """Passes the batch on as it is; no reordering, no split of prefills and decodes."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(None, False)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        common = common_attn_metadata
        if not common.causal:
            raise NotInstalled(
                "vllm.Attention: attention that isn't causal has no proven kernel on the CPU"
            )
        return PagedMetadata(
            num_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class PagedAttentionImpl(AttentionImpl):
    """One layer's attention: store the new keys and values, then attend. Refuses what has no
    proven kernel.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotInstalled(
                f"vllm.Attention: attention type {attn_type} has no proven kernel on the CPU"
            )
        if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise NotInstalled(
                f"vllm.Attention: kv_cache_dtype={kv_cache_dtype} has no proven kernel; use auto"
            )
        if extra:
            raise NotInstalled(
                f"vllm.Attention: options {sorted(extra)} have no proven kernel on the CPU"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.options: dict[str, Any] = {
            "window": int(sliding_window or 0),
            "softcap": float(logits_soft_cap or 0.0),
            "alibi_slopes": None
            if alibi_slopes is None
            else torch.tensor(alibi_slopes, dtype=torch.float32),
            "sinks": sinks,
        }
        kernels = load()
        self._store, self._attend = kernels.reshape_and_cache, kernels.attention

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output [T, Hq, D]; key, value [T, Hk, D]. Without metadata (a dry run) the output
        is zero.
        """
        if attn_metadata is None:
            return output.zero_()
        n = attn_metadata.num_tokens
        if self.kv_sharing_target_layer_name is None and key is not None:
            self._store(key[:n], value[:n], kv_cache, attn_metadata.slot_mapping[:n])
        self._attend(
            query[:n],
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            out=output[:n],
            **self.options,
        )
        return output
