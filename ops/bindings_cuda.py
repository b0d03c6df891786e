"""How vLLM's layers reach the kernels on NVIDIA, under torch.compile and CUDA graphs.

Each op is a torch operator of the namespace `samebits` with a shape function, so that Dynamo traces
through it, Inductor leaves it alone, and a graph captures what it launches. vLLM runs with
VLLM_BATCH_INVARIANT=1 for the sake of its gates (backends, splits, all-reduce), and its own aten
overrides and tiles give way to the rows here: one owner per op.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from ops.kernels.dense import planner
from ops.kernels.triton import bmm, moe, norm, reduce, softmax
from ops.kernels.triton.linear import Tile
from ops.registry import NotInstalled

_state: dict[Any, Any] = {}
_OURS = (torch.bfloat16, torch.float16, torch.float32)


def loaded(what: str) -> dict[Any, None]:
    """The shapes of "attention" or "norms" that layers of this process have been made with: what
    the self-check has to prove beside its own. In the order of their making.
    """
    shapes: dict[Any, None] = _state.setdefault(("loaded", what), {})
    return shapes


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = planner.product(flat, weight, bias)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    return norm.rms_norm(x, weight, eps, gemma=gemma)[0]


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, added = norm.rms_norm(x, weight, eps, residual, gemma=gemma)
    assert added is not None
    return y, added


def _linear_shape(x: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _norm_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fused_shape(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm_shape(x), _norm_shape(x)


def define_operators() -> None:
    """Register samebits::{linear, rms_norm, fused_add_rms_norm} under the CUDA key, once."""
    if "operators" in _state:
        return
    library = torch.library.Library("samebits", "FRAGMENT")
    norm_args = "Tensor weight, float eps, bool gemma"
    for schema, kernel, fake in (
        ("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _linear_shape),
        (f"rms_norm(Tensor x, {norm_args}) -> Tensor", _rms_norm, _norm_shape),
        (f"fused_add_rms_norm(Tensor x, Tensor residual, {norm_args}) -> (Tensor, Tensor)",
         _fused_add_rms_norm, _fused_shape),
    ):  # fmt: skip
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"samebits::{name}", fake, lib=library)
    _state["operators"] = library


# Linear layers, LM head


def install_linear() -> None:
    """Plan each weight as it loads; apply through samebits::linear."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    define_operators()
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = _plan_weight
        method.apply = _apply_linear


def _plan_weight(_: Any, layer: torch.nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        return  # a table that is only looked up; a tied LM head plans it at its first product
    weight = layer.weight
    if weight.ndim != 2:
        raise NotInstalled(f"{type(layer).__name__}: weight {tuple(weight.shape)} is no matrix; "  # type: ignore[arg-type]
                           "no proven kernel")  # fmt: skip
    if weight.device.type == "cuda":
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        planner.plan(weight.data, None if bias is None else bias.data)


def _apply_linear(
    _: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.samebits.linear(x, layer.weight, bias)
    return y


def linear_installed() -> bool:
    """Whether both of vLLM's unquantized methods end in our operator."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(m.apply is _apply_linear for m in methods)


# RMSNorm


def _forward_rms(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if self.variance_size_override is not None:
        raise NotInstalled("vllm.RMSNorm with var_hidden_size: no proven kernel")
    return _call_norm(self, x, residual, False)


def _forward_gemma(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    return _call_norm(self, x, residual, True)


def _call_norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None, gemma: bool) -> Any:
    weight, eps = self.weight, self.variance_epsilon
    if residual is None:
        return torch.ops.samebits.rms_norm(x, weight, eps, gemma)
    return torch.ops.samebits.fused_add_rms_norm(x, residual, weight, eps, gemma)


def install_norms() -> None:
    """Both forms of both classes: vLLM picks one by whether custom ops are on."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    define_operators()
    for norm_class, forward in ((RMSNorm, _forward_rms), (GemmaRMSNorm, _forward_gemma)):
        norm_class.forward_native = forward
        norm_class.forward_cuda = forward
        norm_class.__init__ = _remembered(norm_class.__init__, forward is _forward_gemma)


def _remembered(start: Any, gemma: bool) -> Any:
    """A norm's constructor that also notes its width, for the self-check."""

    @functools.wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        loaded("norms")[(self.weight.shape[0], gemma)] = None

    return __init__


def norms_installed() -> bool:
    """Whether both classes run ours, compiled or not."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    pairs = ((RMSNorm, _forward_rms), (GemmaRMSNorm, _forward_gemma))
    return all(c.forward_native is f and c.forward_cuda is f for c, f in pairs)


# Attention: FlashAttention 3 with one split


class _NoInvariantMode:
    """vllm.envs as FlashAttention's builder sees it: the mode's switch off, so that it may plan a
    step's tiles once instead of in every layer; the splits that come with that are taken away."""

    VLLM_BATCH_INVARIANT = False

    def __getattr__(self, name: str) -> Any:
        from vllm import envs

        return getattr(envs, name)


def install_attention() -> None:
    """One split of the keys in every call, planned once a step; any backend but FlashAttention 3,
    and attention that is not a decoder's, is refused."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.v1.attention.backends import flash_attn

    builder, implementation = (
        flash_attn.FlashAttentionMetadataBuilder,
        flash_attn.FlashAttentionImpl,
    )
    stock_choice = CudaPlatformBase.get_attn_backend_cls.__func__
    stock_build, stock_init = builder.build, implementation.__init__
    stock_plan = flash_attn.get_scheduler_metadata

    def choose(cls: Any, *args: Any, **kwargs: Any) -> str:
        path: str = stock_choice(cls, *args, **kwargs)
        if not path.endswith("flash_attn.FlashAttentionBackend"):
            _refuse("vllm.Attention", f"{path} is not proven", "attention_backend=FLASH_ATTN")
        return path

    def plan(*args: Any, **kwargs: Any) -> Any:
        return stock_plan(*args, **{**kwargs, "num_splits": 1})

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = stock_build(self, *args, **kwargs)
        if metadata.use_cascade or self.dcp_world_size > 1:
            _refuse("vllm.Attention", "cascade or context-parallel", "disable_cascade_attn=true")
        metadata.max_num_splits = 1
        return metadata

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if str(self.attn_type).rpartition(".")[2].lower() != "decoder":
            _refuse("vllm.Attention", f"{self.attn_type} attention is not proven", "another model")
        window = tuple(self.sliding_window or (-1, -1))
        shape = (self.num_heads, self.num_kv_heads, self.head_size, window, self.logits_soft_cap)
        loaded("attention")[shape] = None

    CudaPlatformBase.get_attn_backend_cls = classmethod(choose)
    flash_attn.get_scheduler_metadata = plan
    flash_attn.envs = _NoInvariantMode()
    builder.build, implementation.__init__ = build, init
    _state["attention"] = (plan, build)


def _refuse(op: str, what: str, remedy: str) -> None:
    raise NotInstalled(f"{op}: {what} (remedy: {remedy})")


def attention_installed() -> bool:
    """Whether both halves of the single split are bound, and FlashAttention is version 3."""
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    bound = (flash_attn.get_scheduler_metadata, flash_attn.FlashAttentionMetadataBuilder.build)
    return bound == _state.get("attention") and get_flash_attn_version() == 3


# Mixture of experts: vLLM's grouped kernel with tiles by M, our sum of the slots


def install_moe() -> None:
    """vLLM's Triton experts with tuned tiles, each the same chain, and our sum of the slots."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as method,
    )

    stock_init = method.__init__

    def init(self: Any, moe_config: Any) -> None:
        stock_init(self, moe_config)
        if self.unquantized_backend.name != "TRITON":
            what = f"backend {self.unquantized_backend.name} is not proven"
            _refuse("vllm.FusedMoE", what, "moe_backend=triton")

    method.__init__ = init
    triton_moe.try_get_optimal_moe_config = moe_tile
    triton_moe.TritonExperts.moe_sum = _moe_sum
    _state["moe"] = init


def _moe_sum(_: Any, input: torch.Tensor, output: torch.Tensor) -> None:
    moe.sum_slots(input, output)


def moe_installed() -> bool:
    """Whether tiles and sum are ours."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    sums = triton_moe.TritonExperts.moe_sum is _moe_sum
    return sums and triton_moe.try_get_optimal_moe_config is moe_tile


def moe_tile(
    w1_shape: tuple[int, ...],  # noqa: ARG001
    w2_shape: tuple[int, ...],
    top_k: int,  # noqa: ARG001
    dtype: str | None,
    M: int,
    block_shape: list[int] | None = None,
) -> dict[str, int]:
    """The tile for M tokens: vLLM's tuned one for this chip and shape, or a plain one by M.

    Raises `NotInstalled` for quantized experts and split K.
    """
    if dtype is not None or block_shape is not None:
        raise NotInstalled(f"vllm.FusedMoE: experts of {dtype or block_shape} are not proven")
    key = (w2_shape[0], w2_shape[2])
    tiles = _state.setdefault(("moe", key), _tuned(*key))
    tile: dict[str, int] = tiles[min(tiles, key=lambda rows: abs(rows - M))]
    if tile.get("SPLIT_K", 1) != 1:
        raise NotInstalled(f"vllm.FusedMoE: tile {tile} splits K")
    return {**tile, "SPLIT_K": 1}


def _tuned(experts: int, inner: int) -> dict[int, dict[str, int]]:
    from vllm.model_executor.layers.fused_moe import fused_moe

    name = fused_moe.get_config_file_name(experts, inner, None)
    path = Path(fused_moe.__file__).parent / "configs" / name
    if path.exists():
        found = json.loads(path.read_text())
        return {int(rows): tile for rows, tile in found.items() if rows.isdigit()}
    shapes = {16: (16, 64, 128, 4, 4), 96: (16, 128, 128, 4, 3), 512: (64, 128, 64, 4, 3),
              2048: (128, 128, 64, 8, 3)}  # fmt: skip
    return {
        rows: {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8,
               "num_warps": w, "num_stages": s}
        for rows, (m, n, k, w, s) in shapes.items()
    }  # fmt: skip


# The net: torch's own ops, for whatever does not pass through a layer above

_TILE = Tile(64, 64, 64, 4, 4)
_TILE_F32 = Tile(32, 32, 32, 4, 2)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return bmm.bmm(a, b, tile=_TILE_F32 if a.dtype == torch.float32 else _TILE)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    y = _mm(a, b)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (bias if beta == 1 else bias * beta)


def _softmax_with(kernel: Any) -> Any:
    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        dtype = torch.float32 if half_to_float else x.dtype
        if x.ndim == 0:
            return kernel(x.view(1, 1), dtype).view(())
        return kernel(x.movedim(dim, -1), dtype).movedim(-1, dim)

    return run


def _reduce(mean: bool) -> Any:
    def run(
        x: torch.Tensor, dim: Any = None, keepdim: bool = False, *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return reduce.sum_dims(x, list(dim or ()), keepdim, dtype or x.dtype, mean)

    return run


ATEN: dict[str, Any] = {
    "mm": _mm, "bmm": _bmm, "addmm": _addmm, "_softmax": _softmax_with(softmax.softmax),
    "_log_softmax": _softmax_with(softmax.log_softmax), "sum.dim_IntList": _reduce(False),
    "mean.dim": _reduce(True),
}  # fmt: skip


def install_aten() -> None:
    """Under torch's CUDA key, float types only; and their `.out` forms, which Inductor calls."""
    from vllm.model_executor.layers import batch_invariant

    # vLLM's own overrides of the same ops give way: two owners would be one too many.
    batch_invariant.enable_batch_invariant_mode = _vllm_mode_gives_way
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in ATEN.items():
        stock = torch.library.get_kernel(f"aten::{name}", "CUDA")
        library.impl(name, _guarded(kernel, stock), "CUDA", allow_override=True)
        if name in ("mm", "bmm", "addmm"):
            out = torch.library.get_kernel(f"aten::{name}.out", "CUDA")
            library.impl(f"{name}.out", _guarded(kernel, out), "CUDA", allow_override=True)
    _state["aten"] = library


def _vllm_mode_gives_way() -> None:
    """Stands for vLLM's `enable_batch_invariant_mode`: every op it would take is owned here."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _guarded(kernel: Any, stock: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def run(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if first.dtype not in _OURS or kwargs.get("dtype") not in (None, *_OURS):
            if out is not None:
                kwargs["out"] = out
            found: torch.Tensor = stock.call_boxed(keys, *args, **kwargs)
            return found
        y: torch.Tensor = kernel(*args, **kwargs)
        return y if out is None else out.copy_(y)

    return run


def aten_installed() -> bool:
    """Whether the dispatcher holds a Python kernel under the CUDA key for every op of the net."""
    for name in ATEN:
        held = torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
        line = next((row for row in held if row.startswith("CUDA:")), "")
        if "bindings_cuda" not in line and "/dev/null" not in line:
            return False
    return "aten" in _state
