"""Finds what reaches the device without passing the registry: records every op of a forward pass
and judges each.

An op is fine if it is overridden (a row of the registry), or if it is on the list of ops proven
row-wise, each with its reason. Any other is named, and the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_EXACT = "each element is one exactly rounded operation: the same bits in any loop, at any place, on any thread"  # noqa: E501
_MOVES = "moves or views bits, computes none"
_FILLS = "writes constants or an arithmetic progression of integers"
_INTEGER = "compares or counts: integers and booleans have no rounding"
_EXTREME = "a maximum or minimum has no order"
_ROW = "acts within one row, by a comparison of its own elements"
_HOST = "host-side bookkeeping, no activations"

PROVEN: dict[str, str] = {
    **dict.fromkeys(
        "add add_ sub sub_ rsub mul mul_ div div_ neg neg_ abs sqrt reciprocal clamp clamp_ "
        "clamp_min clamp_max"
        " clamp_min_ clamp_max_ relu relu_ maximum minimum where masked_fill masked_fill_ "
        "square round floor ceil"
        " copysign sign threshold fmod remainder floor_divide".split(),
        _EXACT,
    ),
    **dict.fromkeys(
        "view _unsafe_view reshape view_as expand permute transpose t slice select split "
        "split_with_sizes chunk unbind"
        " unsqueeze squeeze detach alias as_strided clone copy_ _to_copy to contiguous cat "
        "stack index index_select"
        " gather embedding lift_fresh unfold narrow flatten movedim repeat flip index_put_ "
        "index_put scatter scatter_"
        " _reshape_alias constant_pad_nd set_ resize_ repeat_interleave roll tril triu masked_select".split(),  # noqa: E501
        _MOVES,
    ),
    **dict.fromkeys(
        "empty empty_like empty_strided new_empty new_zeros new_ones new_full new_empty_strided zeros zeros_like ones"  # noqa: E501
        " ones_like full full_like fill_ zero_ arange scalar_tensor".split(),
        _FILLS,
    ),
    **dict.fromkeys(
        "eq ne lt le gt ge logical_and logical_or logical_not logical_and_ bitwise_and bitwise_or "
        "bitwise_not"
        " bitwise_xor bitwise_and_ bitwise_or_ isnan isinf isin nonzero any all cumsum bincount equal"  # noqa: E501
        " __rshift__ __lshift__ __and__ __or__ bitwise_left_shift bitwise_right_shift".split(),
        _INTEGER,
    ),
    **dict.fromkeys("max amax min amin argmax argmin".split(), _EXTREME),
    **dict.fromkeys("sort topk _unique2 unique_dim unique_consecutive".split(), _ROW),
    **dict.fromkeys(
        "_local_scalar_dense item is_pinned record_stream sym_size is_same_size".split(), _HOST
    ),
}

# vLLM's own torch ops that only lead to code of ours.
LEADS_TO_OURS: dict[str, str] = {
    "vllm::unified_attention_with_output": "calls the attention backend, which is ours",
    "vllm::unified_kv_cache_update": "calls the attention backend, which is ours",
    "vllm::moe_forward": "calls UnquantizedFusedMoEMethod, which is ours",
    "vllm::moe_forward_shared": "calls UnquantizedFusedMoEMethod, which is ours",
    "vllm::all_reduce": "calls the device communicator, which is ours",
    "vllm::reduce_scatter": "calls the device communicator, which is ours",
    "vllm::all_gather": "moves bits, computes none",
    # what ops.collectives moves bytes with
    "_C::shm_all_gather": "moves bits, computes none",
    "_C::shm_gather": "moves bits, computes none",
    "c10d::_allgather_base_": "moves bits, computes none",
    "c10d::alltoall_base_": "moves bits, computes none",
    "c10d::gather_": "moves bits, computes none",
    # vllm-ascend's, with flashcomm off (the table forces it)
    "vllm::unquantized_gemm": "calls aten::linear, which is ours",
    "vllm::maybe_chunk_residual": "hands the residual on as it is",
    "vllm::maybe_pad_and_reduce": "calls the device communicator, which is ours",
    "vllm::maybe_all_reduce_tensor_model_parallel": "calls the device communicator, which is ours",
}
# On a GPU each element of these is one thread's doing, by the same instructions at every place,
# whether torch's own kernel runs or a generated one. (A CPU takes others for the end of a vector.)
PER_ELEMENT = (
    "silu silu_ gelu gelu_ tanh tanh_ sigmoid sigmoid_ exp exp_ exp2 log log2 log1p expm1 erf "
    "rsqrt rsqrt_ pow pow_ cos sin softplus elu leaky_relu hardtanh mish"
).split()
# What a compiled graph calls through the dispatcher. Other ops of aten it makes anew, so that a row
# of ours for them does not count there.
_CALLED_WHEN_COMPILED = {"aten::mm", "aten::bmm", "aten::addmm"}
_INTEGERS_ONLY = {"cumsum"}  # fine on integers, an order of floats otherwise


class Recorder(TorchDispatchMode):
    """Collects the name of every op that runs under it; `floats` are those that took a
    floating-point tensor. An op that torch makes of others (layer_norm of native_layer_norm) and
    that nobody has judged is taken apart, and its parts are collected.
    """

    def __init__(self, *, compiled: bool = False, device: str = "cpu") -> None:
        super().__init__()
        from ops import registry

        self.seen: set[str] = set()
        self.floats: set[str] = set()
        self._ours = {row.op for row in registry.rows()}
        if compiled:
            aten = {op for op in self._ours if op.startswith("aten::")}
            self._ours -= aten - _CALLED_WHEN_COMPILED
        if device == "cuda":
            self._ours |= set(PER_ELEMENT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not _fine(name, self._ours, {name}):
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        self.seen.add(name)
        if any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
            self.floats.add(name)
        return func(*args, **(kwargs or {}))


def unproven(recorder: Recorder) -> list[str]:
    """The recorded ops that are neither overridden nor proven row-wise, sorted."""
    ours = recorder._ours
    return sorted(name for name in recorder.seen if not _fine(name, ours, recorder.floats))


def _fine(name: str, ours: set[str], floats: set[str]) -> bool:
    if name in ours or name in LEADS_TO_OURS or name.startswith("samebits"):
        return True
    space, _, op = name.partition("::")
    plain = op.partition(".")[0]
    if space not in ("aten", "prim", "prims"):
        return False
    if plain in _INTEGERS_ONLY:
        return name not in floats
    if plain in PROVEN or plain in ours:
        return True
    # A reduction under another overload (`sum.IntList_out`) counts as ours only if its float form
    # can't run.
    return f"aten::{plain}" in {row.partition(".")[0] for row in ours} and name not in floats


@contextmanager
def _uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """The model's own Python runs, not what torch.compile made of it: its ops can be seen."""
    parts = [m for m in model.modules() if getattr(m, "do_not_compile", True) is False]
    try:
        for part in parts:
            part.do_not_compile = True  # type: ignore[assignment]
        yield
    finally:
        for part in parts:
            part.do_not_compile = False  # type: ignore[assignment]


def forward(worker: Any, num_tokens: int = 3, *, compiled: bool = False) -> Recorder:
    """One dry forward pass of a rank's model and LM head, recorded. Needs a worker whose model is
    loaded.
    """
    runner = worker.model_runner
    recorder = Recorder(compiled=compiled, device=str(runner.device.type))
    options: dict[str, Any] = {}
    if compiled and hasattr(runner, "req_states"):  # vLLM's second runner
        options = {"skip_attn": True, "is_profile": True}
    elif compiled:
        from vllm.config import CUDAGraphMode

        options = {"cudagraph_runtime_mode": CUDAGraphMode.NONE}
    with _uncompiled(runner.model), recorder:
        hidden, _ = runner._dummy_run(num_tokens, **options)
        runner.model.compute_logits(hidden[:num_tokens])
    return recorder


def verdict(worker: Any) -> str:
    """ "ok", or what stops the start: the ops by name, or that the model is compiled where the
    proof is of uncompiled ones. On a GPU a compiled model is judged by the ops it is made of.
    """
    mode = worker.vllm_config.compilation_config.mode
    compiled = mode is not None and int(mode) != 0
    if compiled and worker.model_runner.device.type != "cuda":
        return f"the model is compiled (mode {mode}), so its ops are not ours (remedy: enforce_eager=True)"  # noqa: E501
    found = unproven(forward(worker, compiled=compiled))
    if not found:
        return "ok"
    model = type(worker.model_runner.model).__name__
    return (
        f"{model} uses ops that are neither overridden nor proven row-wise: {', '.join(found)} "
        f"(remedy: a model of a supported architecture, or SAMEBITS_DETERMINISM=off to serve without the promise)"  # noqa: E501
    )
