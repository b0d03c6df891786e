"""The Ascend table: every op that is ours on an NPU, by which kernel, and the tiles that fix its
order.

One tile per kernel, for every number of rows: M chooses nothing here and is specialised nowhere.
The tiles fit a 910B's unified buffer and L0C by the offline compiler; see tests/ascend.
"""

from __future__ import annotations

from functools import partial

from ops import bindings_ascend as bind
from ops import bindings_ascend_check as checks
from ops import bindings_ascend_gate as gate
from ops.registry import Override

MATMUL = {"block_m": 32, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 1}
EXPERTS = {"block_m": 16, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 1}

_TILES: dict[str, dict[str, int]] = {
    "linear": MATMUL,
    "addmm": MATMUL,
    "bmm": MATMUL,
    "baddbmm": MATMUL,
}


def rows() -> list[Override]:
    """All override rows of an NPU. Raises `NotInstalled` before anything is bound if this process
    lacks a library, a variable or a version.
    """
    gate.refuse(gate.process_faults())
    return [*_start(), *_aten(), *_functions(), *_layers(), *_collectives()]


def kernels() -> tuple[str, str]:
    """(name, reason) of the kernels in force, for the log and the report."""
    return "ascend", "AscendC for products and attention, Triton for the rest"


def _start() -> list[Override]:
    return [
        Override(
            op="vllm_ascend.init_batch_invariance",
            kernel="ops.bindings_ascend.start_worker",
            reason="vllm-ascend warns and serves where a library is missing; and one owner per op",
            install=bind.bind_start,
            installed=bind.start_is_ours,
            check=bind.check_start,
        )
    ]


def _aten() -> list[Override]:
    return [
        Override(
            op=f"aten::{name}",
            kernel=kernel,
            reason="torch_npu's kernel is chosen by shape, the number of rows among it",
            install=partial(bind.bind_aten, name),
            installed=partial(bind.aten_is_ours, name),
            check=partial(checks.check_aten, name),
            tiles=_TILES.get(name, {}),
        )
        for name, (_, kernel) in bind.ATEN.items()
    ]


def _functions() -> list[Override]:
    reasons = {
        "npu_rms_norm": "the closed kernel has no claim to depend on the row alone",
        "npu_add_rms_norm": "the fused kernel depends on the batch, by vllm-ascend's own comment",
        "npu_swiglu": "the closed kernel has no claim to treat the ends of its input as the middle",
    }
    functions = [
        Override(
            op=f"torch_npu.{name}",
            kernel="triton:silu_mul" if name == "npu_swiglu" else "triton:rms_norm",
            reason=reasons[name],
            install=partial(bind.bind_function, name),
            installed=partial(bind.function_is_ours, name),
            check=partial(checks.check_function, name),
        )
        for name in bind.FUNCTIONS
    ]
    attention = Override(
        op="torch_npu.npu_fused_infer_attention_score",
        kernel="AscendC:fused_infer_attention_score",
        reason="the stock kernel splits keys by what is scheduled together",
        install=bind.bind_attention,
        installed=bind.attention_is_ours,
        check=checks.check_attention,
    )
    return [*functions, attention]


def _layers() -> list[Override]:
    from ops import sampling, sampling_hook

    return [
        Override(
            op="vllm_ascend.AscendUnquantizedFusedMoEMethod",
            kernel="triton:moe",
            reason="routing, grouped products and combining run in closed kernels without a claim",
            install=bind.bind_moe,
            installed=bind.moe_is_ours,
            check=checks.check_moe,
            tiles=EXPERTS,
        ),
        Override(
            op="vllm_ascend.AscendRotaryEmbedding",
            kernel="torch:products and sums",
            reason="vllm-ascend's kernel is compiled anew for one row, and may fuse differently",
            install=bind.bind_rotary,
            installed=bind.rotary_is_ours,
            check=checks.check_rotary,
        ),
        Override(
            op="vllm.Sampler",
            kernel=sampling.SAMPLER,
            reason="draws must depend on (seed, choice, position) and the logits alone",
            install=bind.bind_sampler,
            installed=bind.sampler_is_ours,
            check=sampling_hook.check,
        ),
    ]


def _collectives() -> list[Override]:
    from ops import collectives

    return list(collectives.NPU_ROWS)
