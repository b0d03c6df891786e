"""Refuse instead of warn: what has to be true in every process of an engine on an NPU before
anything of ours is bound, and again in the worker once vllm-ascend has made up its configuration.

vllm-ascend logs one warning when its batch-invariant library is missing, and serves. Here every
fault raises `NotInstalled` with its remedy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from config import determinism, determinism_ascend
from config.settings import environment
from ops.registry import NotInstalled

LIBRARY = "batch_invariant_ops"
STRICT = 2  # HCCL's own number for order-preserving reductions
_IMAGE = "use the image that docs/ascend.md names; a build logs a failed download and goes on"


def process_faults() -> list[str]:
    """What is wrong with this process, one line each: the library, Triton, variables, versions."""
    return [*library_faults(), *variable_faults(environment()), *version_faults()]


def library_faults() -> list[str]:
    """The AscendC package and Triton-Ascend, as vllm-ascend itself sees them in this process."""
    from vllm_ascend import batch_invariant

    faults = []
    if not batch_invariant.HAS_ASCENDC_BATCH_INVARIANT:
        faults.append(
            f"{LIBRARY}: vllm-ascend found no AscendC batch-invariant library "
            f"(HAS_ASCENDC_BATCH_INVARIANT is False). Remedy: {_IMAGE}."
        )
    if not batch_invariant.HAS_TRITON or _missing("triton-ascend"):
        faults.append(
            "triton-ascend: not installed or not active in this process, so half of the ops have "
            f"no kernel. Remedy: pip install triton-ascend=={_tested('triton-ascend')}."
        )
    return faults


def variable_faults(env: Mapping[str, str]) -> list[str]:
    """Forced variables that do not have their value here: someone set them after the parent did."""
    faults = []
    for row in determinism.table("npu"):
        if not isinstance(row, determinism.Force) or row.kind != "env":
            continue
        if env.get(row.name) != row.value:
            want = "unset" if row.value is None else row.value
            faults.append(
                f"{row.name}: {env.get(row.name)!r} in this process, must be {want} "
                f"({row.reason}). "
                "Remedy: start with `samebits serve`, and set nothing in between."
            )
    return faults


def version_faults() -> list[str]:
    """Chip and package versions outside the tested set, as the table of refusals has them."""
    from config.settings import Settings

    faults = []
    for row in determinism_ascend.REFUSED:
        if isinstance(row, determinism.Refuse) and row.name.startswith(("chip", "CANN", "version")):
            found = row.found(Settings.model_construct(), environment())
            if found:
                faults.append(f"{found}: {row.reason}. Remedy: {row.remedy}.")
    return faults


def engine_faults(config: Any, ascend: Any) -> list[str]:
    """What vLLM's and vllm-ascend's configuration came out as, against what the table forces."""
    faults = [
        f"additional_config.{name}: came out as {getattr(ascend, name)!r}, must be {value!r}. "
        "Remedy: leave additional_config to Samebits."
        for name, value in determinism_ascend.ADDITIONAL.items()
        if not isinstance(value, dict) and getattr(ascend, name, value) not in (value, None)
    ]
    faults += [
        f"{what}: not proven invariant on Ascend. Remedy: run with {remedy}."
        for what, remedy, found in ENGINE
        if found(config)
    ]
    return faults


def hccl_faults(world_size: int) -> list[str]:
    """Whether HCCL itself reads "strict" in this process; asked only where ranks reduce."""
    if world_size == 1:
        return []
    value = hccl_deterministic()
    if value == STRICT:
        return []
    return [
        f"HCCL: its own configuration reads HCCL_DETERMINISTIC={value}, not strict ({STRICT}). "
        f"Remedy: CANN {determinism_ascend.CANN[0]}, and nothing that calls HcclSetConfig first."
    ]


def hccl_deterministic(library: str = "libhccl.so") -> int | None:
    """HcclGetConfig(HCCL_DETERMINISTIC): 0 off, 1 true, 2 strict; None where it cannot be asked."""
    try:
        ask = ctypes.CDLL(library).HcclGetConfig
    except (OSError, AttributeError):
        return None
    value = ctypes.c_int32(-1)
    return value.value if ask(0, ctypes.byref(value)) == 0 else None


def refuse(faults: list[str]) -> None:
    """Raise `NotInstalled` with every fault on its own line; nothing if there is none."""
    if faults:
        raise NotInstalled("\n".join(faults))


def _of_model(config: Any, name: str) -> Any:
    return getattr(config.model_config.hf_text_config, name, None)


def _context_parallel(parallel: Any) -> int:
    return int(parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size)


def _graphs(config: Any) -> str:
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None else str(mode.name)


def _phases(config: Any) -> bool:
    chosen = config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__qualname__", "")
    return bool(name) and name.rpartition(".")[2] == "PhaseScheduler"


def _missing(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return True
    return False


def _tested(name: str) -> str:
    return determinism_ascend.TESTED[name][0]


ENGINE: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "MLA and SFA",
        "dense attention",
        lambda c: c.model_config.use_mla or bool(_of_model(c, "index_topk")),
    ),
    ("attention sinks", "no sinks", lambda c: _of_model(c, "model_type") == "gpt_oss"),
    ("quantization", "no quantization", lambda c: c.quant_config is not None),
    ("speculative decoding", "no draft model", lambda c: c.speculative_config is not None),
    ("LoRA", "no adapters", lambda c: c.lora_config is not None),
    (
        "expert parallelism",
        "tensor parallelism",
        lambda c: bool(c.parallel_config.enable_expert_parallel),
    ),
    (
        "data parallelism",
        "one server per replica",
        lambda c: c.parallel_config.data_parallel_size > 1,
    ),
    (
        "pipeline parallelism",
        "tensor parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
    ),
    (
        "context parallelism",
        "tensor parallelism",
        lambda c: _context_parallel(c.parallel_config) > 1,
    ),
    ("prefix caching", "it off", lambda c: bool(c.cache_config.enable_prefix_caching)),
    ("chunked prefill", "it off", lambda c: bool(c.scheduler_config.enable_chunked_prefill)),
    ("full graphs", "enforce_eager", lambda c: _graphs(c) not in ("NONE", "PIECEWISE")),
    (
        "a scheduler that mixes phases",
        "ops.scheduling.PhaseScheduler",
        lambda c: not _phases(c),
    ),
)
"""What an engine must not have come out as: name, what to run with instead, how it is seen."""
