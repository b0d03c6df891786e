"""Binds the Ascend table: torch's ops under the key NPU, torch_npu's functions, vllm-ascend's
layers.

One owner per op. `vllm_ascend.batch_invariant.init_batch_invariance`, which would register its own
choice (with kernels that overflow, overloads that bind nothing, and holes), is replaced by ours.
Matrix products without a bias and attention run in the closed AscendC library; everything else in
`ops/kernels/triton`, with the one tile of `ops/backends/ascend.py` for every number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops import bindings_ascend_gate as gate
from ops.registry import NotInstalled

KEY = "NPU"
GRID = 65535
"""Most programs that Triton-Ascend launches at once; longer inputs go in slabs of whole rows."""
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)

hits: Counter[str] = Counter()
"""How often each bound op ran in this process."""
_state: dict[str, Any] = {}


# ---- torch's ops ----


def mm(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N]. AscendC for 16-bit floats, Triton for fp32."""
    if a.dtype in HALVES:
        product: Tensor = _ascendc("npu_mm_batch_invariant")(a, b)
        return product
    return bmm(a[None], b[None])[0]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul: every matrix product of a 16-bit model without a bias ends here."""
    if a.dtype in HALVES:
        product: Tensor = _ascendc("npu_matmul_batch_invariant")(a, b)
        return product
    if a.ndim == 1:
        return matmul(a[None], b).squeeze(-2)
    if b.ndim == 1:
        return matmul(a, b[:, None]).squeeze(-1)
    if b.ndim == 2:
        return mm(a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    right = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    return bmm(left, right).view(*batch, a.shape[-2], b.shape[-1])


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] @ [B, K, N], Triton."""
    from ops.backends.ascend import MATMUL
    from ops.kernels.triton.bmm import bmm as kernel

    return kernel(a, b, tile=_tile(MATMUL))


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta bias + alpha a @ b, added in fp32 after one rounding of the product."""
    return _scaled_add(bias, bmm(a, b), beta, alpha)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta bias + alpha a @ b; a vector added to a linear layer's product inside the kernel."""
    if beta == 1 and alpha == 1 and bias.ndim == 1:
        return linear(a, b.t(), bias)
    return _scaled_add(bias, mm(a, b), beta, alpha)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias. Without a bias AscendC, with one Triton."""
    if bias is None:
        return matmul(x, weight.t())
    from ops.backends.ascend import MATMUL
    from ops.kernels.triton.linear import linear as kernel

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = kernel(rows, weight.contiguous(), bias, tile=_tile(MATMUL))
    return y.view(*x.shape[:-1], weight.shape[0])


def softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """aten::_softmax; `half_to_float` asks for an fp32 result."""
    return _normalised("softmax", x, dim, torch.float32 if half_to_float else x.dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """aten::_log_softmax."""
    return _normalised("log_softmax", x, dim, torch.float32 if half_to_float else x.dtype)


def softmax_int(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """aten::softmax.int, which torch_npu registers beside aten::_softmax."""
    return _normalised("softmax", x, dim, dtype or x.dtype)


def log_softmax_int(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """aten::log_softmax.int."""
    return _normalised("log_softmax", x, dim, dtype or x.dtype)


def sum_dims(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """aten::sum.dim_IntList, the overload that vllm-ascend leaves alone."""
    return _summed(x, dim, keepdim, dtype, mean=False)


def mean_dims(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """aten::mean.dim."""
    return _summed(x, dim, keepdim, dtype, mean=True)


def sum_all(x: Tensor, *, dtype: Any = None) -> Tensor:
    """aten::sum."""
    return _summed(x, None, False, dtype, mean=False)


def mean_all(x: Tensor, *, dtype: Any = None) -> Tensor:
    """aten::mean."""
    return _summed(x, None, False, dtype, mean=True)


ATEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mm": (mm, "AscendC:mm"),
    "matmul": (matmul, "AscendC:matmul"),
    "linear": (linear, "AscendC:matmul, triton:linear with a bias"),
    "addmm": (addmm, "triton:linear"),
    "bmm": (bmm, "triton:bmm"),
    "baddbmm": (baddbmm, "triton:bmm"),
    "_softmax": (softmax, "triton:softmax"),
    "softmax.int": (softmax_int, "triton:softmax"),
    "_log_softmax": (log_softmax, "triton:log_softmax"),
    "log_softmax.int": (log_softmax_int, "triton:log_softmax"),
    "sum": (sum_all, "triton:sum"),
    "sum.dim_IntList": (sum_dims, "triton:sum"),
    "mean": (mean_all, "triton:mean"),
    "mean.dim": (mean_dims, "triton:mean"),
}


def bind_aten(name: str) -> None:
    """Register one op under the key NPU. Raises `NotInstalled` if someone else already has."""
    kernel = ATEN[name][0]
    op = _overload(name)
    stock = _stock(name, op)

    def bound(*args: Any, **kwargs: Any) -> Any:
        first = next((a for a in args if isinstance(a, Tensor)), None)
        wanted = kwargs.get("dtype")
        if first is None or first.dtype not in FLOATS or wanted not in (None, *FLOATS):
            return stock(*args, **kwargs)  # integers have no rounding, float64 no activations
        hits[name] += 1
        return kernel(*args, **kwargs)

    if "library" not in _state:
        _state["library"] = torch.library.Library("aten", "IMPL")
    library = _state["library"]
    try:
        library.impl(name, bound, KEY)
    except RuntimeError as fault:
        raise NotInstalled(
            f"aten::{name}: already has an owner in this process ({str(fault).splitlines()[0]}). "
            "Remedy: leave batch invariance to Samebits; no other plugin may register it."
        ) from fault
    _state[name] = bound


def aten_is_ours(name: str) -> bool:
    """Whether the dispatcher's kernel for the NPU is the one that was bound here."""
    held = torch._C._dispatch_dump_table(f"aten::{name}")
    line = next((row for row in held.splitlines() if row.startswith("PrivateUse1:")), "")
    return name in _state and "bindings_ascend" in line


# ---- torch_npu's functions ----


def bind_attention() -> None:
    """torch_npu's fused attention is the AscendC library's, under the name that models call."""
    import torch_npu

    attention = _ascendc("npu_fused_infer_attention_score_batch_invariant")

    def npu_fused_infer_attention_score(*args: Any, **kwargs: Any) -> Any:
        hits["npu_fused_infer_attention_score"] += 1
        return attention(*args, **kwargs)

    _state["attention"] = npu_fused_infer_attention_score
    torch_npu.npu_fused_infer_attention_score = npu_fused_infer_attention_score


def attention_is_ours() -> bool:
    """Whether models reach the AscendC attention."""
    import torch_npu

    return "attention" in _state and (
        torch_npu.npu_fused_infer_attention_score is _state["attention"]
    )


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor | None]:
    """torch_npu.npu_rms_norm in one order. The second result, 1/rms, is None: nothing in a served
    model reads it.
    """
    hits["npu_rms_norm"] += 1
    return _norm(x, gamma, epsilon, None)[0], None


def npu_add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, None, Tensor]:
    """torch_npu.npu_add_rms_norm: never the fused kernel, which depends on the batch."""
    hits["npu_add_rms_norm"] += 1
    y, total = _norm(x, gamma, epsilon, residual)
    assert total is not None
    return y, None, total


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """torch_npu.npu_swiglu: round(silu(gate)) times up, by one kernel for every number of rows."""
    from ops.kernels.triton.moe import _silu_mul_kernel

    hits["npu_swiglu"] += 1
    if dim not in (-1, x.ndim - 1):
        raise NotInstalled(f"torch_npu.npu_swiglu: dim {dim}; only the last one has a kernel here")
    width = x.shape[-1] // 2
    chunks = -(-width // 1024)

    def run(rows: Tensor) -> Tensor:
        y = rows.new_empty((len(rows), width))
        if len(rows):
            _silu_mul_kernel[(len(rows), chunks)](rows, y, width, BLOCK=1024)
        return y

    y = _slabs(x.reshape(-1, x.shape[-1]).contiguous(), chunks, run)
    return y.view(*x.shape[:-1], width)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_swiglu": npu_swiglu,
}


def bind_function(name: str) -> None:
    """Put one function in torch_npu's place; the layers look the name up when they run."""
    import torch_npu

    setattr(torch_npu, name, FUNCTIONS[name])


def function_is_ours(name: str) -> bool:
    """Whether torch_npu's name leads here."""
    import torch_npu

    return getattr(torch_npu, name) is FUNCTIONS[name]


# ---- vllm-ascend ----


def bind_start() -> None:
    """Our own start in the worker, instead of vllm-ascend's batch-invariant mode."""
    import sys

    from vllm_ascend import batch_invariant

    batch_invariant.init_batch_invariance = start_worker
    worker = sys.modules.get("vllm_ascend.worker.worker")
    if worker is not None:
        worker.init_batch_invariance = start_worker  # type: ignore[attr-defined]


def start_is_ours() -> bool:
    """Whether the worker's start leads here."""
    import sys

    from vllm_ascend import batch_invariant

    worker = sys.modules.get("vllm_ascend.worker.worker")
    owners = [batch_invariant, *([worker] if worker is not None else [])]
    return all(owner.init_batch_invariance is start_worker for owner in owners)


def start_worker() -> None:
    """Runs in every worker after the device is chosen and before HCCL's groups are made."""
    from vllm_ascend.ascend_config import get_ascend_config

    ascend = get_ascend_config()
    gate.refuse(gate.process_faults() + gate.engine_faults(ascend.vllm_config, ascend))
    strict = torch.are_deterministic_algorithms_enabled() and (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    torch.use_deterministic_algorithms(True, warn_only=not strict)  # never less than was asked for
    _state["started"] = True


def check_start() -> None:
    """In a worker: it went through our start, torch is deterministic, and HCCL reads strict."""
    import torch.distributed as dist

    faults = gate.library_faults()
    if dist.is_initialized():
        if not _state.get("started"):
            faults.append(
                "vllm_ascend.init_batch_invariance: this worker did not start through Samebits. "
                "Remedy: load the plugin in every process (VLLM_PLUGINS)."
            )
        if not torch.are_deterministic_algorithms_enabled():
            faults.append("torch.use_deterministic_algorithms: turned off again. Remedy: leave it.")
        faults += gate.hccl_faults(dist.get_world_size())
    gate.refuse(faults)


def bind_moe() -> None:
    """Routing, experts and the sum of their answers, with the weights as they were loaded."""
    from vllm_ascend.ops.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod as method

    method.process_weights_after_loading = _keep_weights
    method.apply = experts


def moe_is_ours() -> bool:
    """Whether unquantized experts run here."""
    from vllm_ascend.ops.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod as method

    return method.apply is experts and method.process_weights_after_loading is _keep_weights


def _keep_weights(self: Any, layer: Any) -> None:  # noqa: ARG001
    """[E, 2I, H] and [E, H, I] stay as they are: unit stride along what is summed."""
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name).data.contiguous()
        setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))


def experts(self: Any, layer: Any, x: Tensor, **options: Any) -> Any:
    """vllm-ascend's `apply` of unquantized experts, for softmax routing and SiLU.

    Raises `NotInstalled` on any other kind of expert layer: no silent second path.
    """
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult

    from ops.backends.ascend import EXPERTS
    from ops.kernels.triton.moe import moe

    _refuse_experts(self, layer, options)
    hits["experts"] += 1
    weights, ids = route(options["router_logits"], options["top_k"], options["renormalize"])
    scale = options.get("routed_scaling_factor") or 1.0
    if scale != 1.0:
        weights = weights * scale
    y = moe(x, layer.w13_weight, layer.w2_weight, weights, ids, tile=_tile(EXPERTS))
    return FusedExpertsResult(routed_out=y)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """[T, E] -> weights fp32 [T, k] and expert ids [T, k]; the renormalising sum in slot order."""
    probabilities = softmax_int(logits.float(), -1)
    weights, ids = probabilities.topk(top_k, dim=-1)
    if renormalize:
        total = weights[:, 0].clone()
        for slot in range(1, top_k):
            total = total + weights[:, slot]
        weights = weights / total[:, None]
    return weights, ids


def _scoring(options: dict[str, Any]) -> str:
    return str(options.get("scoring_func", "softmax"))


def _activation(options: dict[str, Any]) -> str:
    chosen = options.get("activation", "silu")
    return str(getattr(chosen, "value", chosen))


EXPERTS_REFUSED: tuple[tuple[str, Callable[[Any, Any, dict[str, Any]], Any]], ...] = (
    ("grouped top-k", lambda _m, _l, o: o.get("use_grouped_topk")),
    ("a routing function of its own", lambda _m, _l, o: o.get("custom_routing_function")),
    ("scoring other than softmax", lambda _m, _l, o: _scoring(o) != "softmax"),
    ("a score correction", lambda _m, _l, o: o.get("e_score_correction_bias") is not None),
    ("an expert map", lambda _m, _l, o: o.get("expert_map") is not None),
    ("weights on the input", lambda _m, _l, o: o.get("apply_router_weight_on_input")),
    ("an activation other than SiLU", lambda _m, _l, o: _activation(o) != "silu"),
    ("expert biases", lambda m, _l, _o: m.moe.has_bias),
    ("zero experts", lambda _m, layer, _o: getattr(layer, "zero_expert_num", 0)),
)
"""What an expert layer must not ask for: name, and how it is seen in (method, layer, options)."""


def _refuse_experts(method: Any, layer: Any, options: dict[str, Any]) -> None:
    found = [what for what, there in EXPERTS_REFUSED if there(method, layer, options)]
    if found:
        raise NotInstalled(
            f"vllm_ascend.FusedMoE: {', '.join(found)}: no proven kernel. "
            "Remedy: a MoE model with softmax routing and SiLU, such as Qwen3-MoE."
        )


def bind_rotary() -> None:
    """Rotary embedding in elementwise products and sums, each rounded once: nothing to fuse."""
    from vllm_ascend.ops.rotary_embedding import AscendRotaryEmbedding

    AscendRotaryEmbedding.forward_oot = rotary_layer


def rotary_is_ours() -> bool:
    """Whether vllm-ascend's plain rotary layer runs here."""
    from vllm_ascend.ops.rotary_embedding import AscendRotaryEmbedding

    return AscendRotaryEmbedding.forward_oot is rotary_layer


def rotary_layer(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    is_neox_style_override: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """AscendRotaryEmbedding.forward_oot. Raises `NotInstalled` on offsets: no model here has
    any."""
    if offsets is not None:
        raise NotInstalled("vllm_ascend.RotaryEmbedding: offsets have no proven kernel")
    hits["rotary"] += 1
    neox = self.is_neox_style if is_neox_style_override is None else is_neox_style_override
    table = self.cos_sin_cache[positions.flatten()].float()
    sizes = self.head_size, self.rotary_dim
    return rotary(query, table, *sizes, neox), rotary(key, table, *sizes, neox)


def rotary(x: Tensor, table: Tensor, head_size: int, rotary_dim: int, neox: bool) -> Tensor:
    """x [T, heads * head_size], table fp32 [T, rotary_dim] = cos | sin of each position.

    (a, b) -> (a cos - b sin, b cos + a sin) in fp32, rounded once to x's dtype. Pairs are halves of
    the head (neox) or neighbours.
    """
    heads = x.reshape(len(table), -1, head_size)
    turned, kept = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
    cos, sin = (part[:, None] for part in table.chunk(2, -1))
    a, b = turned.chunk(2, -1) if neox else (turned[..., ::2], turned[..., 1::2])
    first, second = a * cos - b * sin, b * cos + a * sin
    out = torch.cat((first, second), -1) if neox else torch.stack((first, second), -1).flatten(-2)
    return torch.cat((out.to(x.dtype), kept), -1).view(x.shape)


def bind_sampler() -> None:
    """The seeded draw in vllm-ascend's model runner."""
    from vllm_ascend.worker import model_runner_v1 as runner

    from ops import sampling_hook

    sampling_hook.install()
    sampling_hook.bind(runner.NPUModelRunner)
    sampling_hook._bind_grammar(runner)


def sampler_is_ours() -> bool:
    """Whether NPUModelRunner draws here."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    from ops import sampling_hook

    return sampling_hook.installed() and getattr(NPUModelRunner._sample, "_samebits", False)


# ---- pieces ----


def _ascendc(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.batch_invariant_ops, name)
    return found


def _tile(numbers: dict[str, int]) -> Any:
    from ops.kernels.triton.linear import Tile

    return Tile(**numbers)


def _scaled_add(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    total = product.float() * alpha
    if beta != 0:
        total = total + bias.float() * beta
    return total.to(product.dtype)


def _slabs(x: Tensor, programs: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run` over [rows, n] in slabs that no launch of `programs` per row makes too long."""
    most = max(1, GRID // programs)
    if len(x) <= most:
        return run(x)
    return torch.cat([run(part) for part in torch.split(x, most)])


def _normalised(name: str, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    from ops.kernels.triton import softmax as kernels

    if x.ndim == 0:
        return _normalised(name, x[None], 0, dtype)[0]
    last = x.movedim(dim, -1)
    rows = last.reshape(-1, last.shape[-1])
    chunks = -(-max(rows.shape[-1], 1) // kernels.CHUNK)
    y = _slabs(rows, chunks, lambda part: getattr(kernels, name)(part, dtype))
    return y.view(last.shape).movedim(-1, dim)


def _summed(x: Tensor, dim: Any, keepdim: bool, dtype: Any, mean: bool) -> Tensor:
    from ops.kernels.triton.reduce import sum_dims as kernel

    dims = [dim] if isinstance(dim, int) else list(dim or ())
    chosen = sorted({d % x.ndim for d in dims}) if dims and x.ndim else list(range(x.ndim))
    kept = [d for d in range(x.ndim) if d not in chosen]
    flat = x.permute(*kept, *chosen).reshape([*(x.shape[d] for d in kept), -1]) if x.ndim else x
    rows = flat.reshape(-1, flat.shape[-1]) if x.ndim else flat.reshape(1, 1)
    y = _slabs(rows, 1, lambda part: kernel(part, [-1], False, dtype or x.dtype, mean))
    shape: Sequence[int] = [x.shape[d] for d in kept]
    if keepdim:
        shape = [1 if d in chosen else x.shape[d] for d in range(x.ndim)]
    return y.view(list(shape))


def _norm(
    x: Tensor, gamma: Tensor, epsilon: float, residual: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    from ops.kernels.triton.norm import rms_norm

    most = (
        GRID
        if x.ndim == 2
        else GRID // max(1, x.numel() // (len(x) * x.shape[-1]) if len(x) else 1)
    )
    if len(x) <= most:
        return rms_norm(x, gamma, epsilon, residual)
    parts = [
        rms_norm(
            x[i : i + most], gamma, epsilon, None if residual is None else residual[i : i + most]
        )
        for i in range(0, len(x), most)
    ]
    totals = [total for _, total in parts if total is not None]
    return torch.cat([y for y, _ in parts]), torch.cat(totals) if totals else None


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _stock(name: str, op: Any) -> Callable[..., Any]:
    """The kernel that was there before, for dtypes that are not ours."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1"):
        kernel = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
        return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd"):
        decompose: Callable[..., Any] = op.decompose
        return decompose
    raise NotInstalled(f"aten::{name}: the device has no kernel for it under any key")
