"""The Ascend rows of the table: what orders a reduction, what chooses a path by the batch, and what
is refused on an NPU. `source` names a file of vllm-ascend 0.23.0.post1, HCCL's source, or a page.

None of these rows was seen at work on an NPU; docs/ascend.md says which facts were run where.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from config.determinism import Force, Refuse, Row
from config.device import package_version
from config.settings import Settings

NPU = ("npu",)
TESTED = {
    "vllm": ("0.23.0",),
    "vllm-ascend": ("0.23.0.post1",),
    "torch": ("2.10.0",),
    "torch-npu": ("2.10.0.post4",),
    "triton-ascend": ("3.2.2",),
}
CHIPS = ("A2", "A3")
CANN = ("9.1.0",)

ADDITIONAL: Mapping[str, Any] = {
    "weight_nz_mode": 0,
    "enable_matmul_allreduce": False,
    "enable_flashcomm1": False,
    "enable_flashcomm2_parallel_size": 0,
    "enable_fused_mc2": 0,
    "enable_prefill_mc2": False,
    "enable_mc2_hierarchy_comm": False,
    "enable_balance_scheduling": False,
    "enable_async_exponential": False,
    "enable_reduce_sample": False,
    "enable_shared_expert_dp": False,
    "multistream_overlap_shared_expert": False,
    "multistream_overlap_gate": False,
    "enable_kv_nz": False,
    "recompute_scheduler_enable": False,
    "ascend_compilation_config": {
        "enable_npugraph_ex": False,
        "enable_static_kernel": False,
        "fuse_norm_quant": False,
        "fuse_qknorm_rope": False,
        "fuse_allreduce_rms": False,
        "fuse_muls_add": False,
    },
}
"""`additional_config` of vllm-ascend: every option that fuses, splits or reorders by the batch."""


def _env(name: str, value: str | None, reason: str, source: str, *welcome: str) -> Force:
    return Force("env", name, value, NPU, reason, source, welcome)


def _option(name: str, value: Any, reason: str, source: str, instead: str = "") -> Force:
    return Force("option", name, value, NPU, reason, source, instead=instead)


def _model_config(settings: Settings) -> Mapping[str, Any]:
    """The config.json of a model folder; empty for a hub id, which the worker's own gate sees."""
    path = Path(settings.model) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _model_has(*keys: str) -> Callable[[Settings, Mapping[str, str]], str | None]:
    def found(settings: Settings, _: Mapping[str, str]) -> str | None:
        config = _model_config(settings)
        for key in keys:
            if config.get(key):
                return f"SAMEBITS_MODEL={settings.model}: {key} in its config.json"
        return None

    return found


def _sinks(settings: Settings, _: Mapping[str, str]) -> str | None:
    kind = _model_config(settings).get("model_type")
    return f"SAMEBITS_MODEL={settings.model}: model_type {kind}" if kind == "gpt_oss" else None


def _version(name: str) -> Callable[[Settings, Mapping[str, str]], str | None]:
    def found(_settings: Settings, _env: Mapping[str, str]) -> str | None:
        have = package_version(name)
        if have is None:
            return f"{name} is not installed"
        if have.partition("+")[0] in TESTED[name]:
            return None
        return f"{name} {have}"

    return found


def chip() -> str | None:
    """The device type that vllm-ascend was built for ("A2", "A3", …), without importing it."""
    spec = importlib.util.find_spec("vllm_ascend")
    for place in (spec.submodule_search_locations or []) if spec else []:
        info = Path(place) / "_build_info.py"
        if info.is_file():
            match = re.search(r"__device_type__\s*=\s*['\"](\w+)['\"]", info.read_text())
            return match.group(1) if match else None
    return None


def _chip(_settings: Settings, _env: Mapping[str, str]) -> str | None:
    found = chip()
    return None if found in CHIPS else f"vllm-ascend built for {found or 'an unknown chip'}"


def cann_version(env: Mapping[str, str]) -> str | None:
    """The toolkit's version as its installer wrote it down, or None where nothing says."""
    home = env.get("ASCEND_TOOLKIT_HOME") or env.get("ASCEND_HOME_PATH")
    if not home:
        return None
    for info in sorted(Path(home).glob("*-linux/ascend_toolkit_install.info")):
        match = re.search(r"^version=(\S+)", info.read_text(), re.MULTILINE)
        if match:
            return match.group(1)
    return None


def _cann(_: Settings, env: Mapping[str, str]) -> str | None:
    have = cann_version(env)
    if have is None:
        return "CANN: no version to be read under ASCEND_TOOLKIT_HOME or ASCEND_HOME_PATH"
    return None if have in CANN else f"CANN {have}"


def _whole_prompts(settings: Settings, _: Mapping[str, str]) -> str | None:
    longest = settings.max_model_len
    if longest is None or longest <= settings.max_num_batched_tokens:
        return None
    return (
        f"SAMEBITS_MAX_NUM_BATCHED_TOKENS={settings.max_num_batched_tokens} < "
        f"SAMEBITS_MAX_MODEL_LEN={longest}"
    )


_BI = "vllm_ascend/batch_invariant.py"
_CONFIG = "vllm_ascend/ascend_config.py"
_ENVS = "vllm_ascend/envs.py"
_CP = "vllm_ascend/attention/context_parallel/attention_cp.py"
_FAQ = "vllm-ascend docs/source/faqs.md, 15"
_TENSOR_PARALLEL = "share the model out with SAMEBITS_TENSOR_PARALLEL_SIZE"

COLLECTIVES: tuple[Row, ...] = (
    _env(
        "HCCL_DETERMINISTIC",
        "strict",
        "with anything less HCCL picks the order of a reduction by message size; second line behind"
        " ops.collectives",
        "CANN envref_07_0099; hccl all_reduce_operator.cc",
        "true",
    ),
    _env("LCCL_DETERMINISTIC", "1", "the same for LCCL, if anything uses it", _FAQ, "true"),
    _env(
        "HCCL_OP_EXPANSION_MODE",
        None,
        "AIV takes small messages around the ordered executor on A3",
        "hccl SelectAlgfor91093",
        "AI_CPU",
        "HOST",
    ),
    _env("HCCL_ALGO", None, "one choice of algorithm, the one strict makes", "CANN envref_07_0079"),
    _env("HCCL_BUFFSIZE", "200", "HCCL compares sizes with this buffer", "vllm_ascend/utils.py"),
    _env(
        "HCCL_INTER_HCCS_DISABLE",
        None,
        "strict holds over HCCS only",
        "CANN envref_07_0099",
        "FALSE",
    ),
    _env("ATB_LLM_LCOC_ENABLE", "0", "overlaps computing and communicating by size", _FAQ, "1"),
    _env(
        "INF_NAN_MODE_ENABLE",
        "1",
        "strict needs INF/NaN mode, and saturation hides an overflow",
        "CANN envref_07_0099",
    ),
    _env("INF_NAN_MODE_FORCE_DISABLE", None, "turns INF/NaN mode off", "torch_npu docs"),
)

KERNELS: tuple[Row, ...] = (
    _env(
        "VLLM_BATCH_INVARIANT",
        "1",
        "turns off vLLM's and vllm-ascend's own batch-dependent paths around our ops",
        _BI,
    ),
    _env(
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "0",
        "NNAL's set_env.sh turns on a matmul that shuffles K",
        _FAQ,
        "1",
    ),
    _env(
        "CLOSE_MATMUL_K_SHIFT",
        "1",
        "turns the shift of a matmul's K axis off",
        "verl, Ascend guide on aligning with vLLM",
    ),
    _env("VLLM_ASCEND_ENABLE_NZ", "0", "another weight layout is another kernel", _BI, "1"),
    _env("VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE", "0", "fuses past the ordered sum", _ENVS),
    _env("VLLM_ASCEND_ENABLE_FLASHCOMM1", "0", "splits rows by the number of tokens", _ENVS),
    _env("VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE", "0", "exchanges rows by their number", _ENVS),
    _env("VLLM_ASCEND_ENABLE_FUSED_MC2", "0", "fuses experts and communication", _ENVS),
    _env("VLLM_ASCEND_ENABLE_MLAPO", "0", "an MLA kernel that is not proven", _ENVS, "1"),
    _env("VLLM_ASCEND_BALANCE_SCHEDULING", "0", "schedules by load", _ENVS),
    _env("DYNAMIC_EPLB", "false", "moves experts by load", _ENVS),
    _env("VLLM_USE_V2_MODEL_RUNNER", "0", "the other runner is the proven one", "vllm/envs.py"),
    _option(
        "additional_config",
        ADDITIONAL,
        "vllm-ascend's options that fuse, split or reorder by the batch, all off",
        _CONFIG,
    ),
    _option(
        "compilation_config",
        {"cudagraph_mode": "PIECEWISE"},
        "the batch-invariant attention has no full graphs, and vllm-ascend does not check",
        "vllm-ascend docs, batch_invariance.md",
        "serve without graphs",
    ),
    _option(
        "enforce_eager",
        True,
        "what runs inside a captured graph cannot be recorded and judged; piecewise graphs stay off"
        " until it can",
        "ops/recorder.py",
    ),
    _option(
        "block_size",
        128,
        "the attention's block of keys; vllm-ascend sets it only with the options below on",
        "vllm_ascend/utils.py, refresh_block_size",
    ),
    _option("attention_backend", None, "one attention kernel", "vllm_ascend/platform.py"),
)

SCHEDULING: tuple[Row, ...] = (
    _option(
        "scheduler_cls",
        "ops.scheduling.PhaseScheduler",
        "prefill and decode take different attention paths, chosen by what else is in the batch",
        "vllm_ascend/worker/model_runner_v1.py, _build_attn_state; vllm-ascend issue 10072",
    ),
    _option(
        "enable_chunked_prefill",
        False,
        "a chunk ends where the neighbours leave room, and a second chunk takes another path",
        "vllm_ascend/attention/attention_v1.py, _get_fia_params",
        "set SAMEBITS_MAX_NUM_BATCHED_TOKENS to at least SAMEBITS_MAX_MODEL_LEN",
    ),
    _option(
        "enable_prefix_caching",
        False,
        "a prefix hit takes the paged path where a miss takes the dense one",
        "vllm_ascend/attention/attention_v1.py, _get_fia_params",
    ),
    _option("async_scheduling", False, "the scheduler above is synchronous", "ops/scheduling.py"),
    _option(
        "enable_expert_parallel",
        False,
        "sends rows to other ranks by what the batch routes there; no claim, no proof",
        "vllm-ascend docs, batch_invariance.md (no word of it)",
        _TENSOR_PARALLEL,
    ),
    _option(
        "prefill_context_parallel_size",
        1,
        "context parallelism bypasses the invariant attention",
        _CP,
        _TENSOR_PARALLEL,
    ),
    _option(
        "decode_context_parallel_size",
        1,
        "context parallelism bypasses the invariant attention",
        _CP,
        _TENSOR_PARALLEL,
    ),
    _option(
        "data_parallel_size",
        1,
        "pads by the other replicas' load",
        "vllm_ascend/worker/model_runner_v1.py, _sync_metadata_across_dp",
        "run one server per replica",
    ),
    _option(
        "pipeline_parallel_size",
        1,
        "keeps several batches in flight, shared out by load; no claim, no proof",
        "vllm-ascend docs, batch_invariance.md (no word of it)",
        _TENSOR_PARALLEL,
    ),
    Refuse(
        "whole prompts",
        NPU,
        "prompts are prefilled whole, so the longest must fit into one batch",
        "raise SAMEBITS_MAX_NUM_BATCHED_TOKENS to SAMEBITS_MAX_MODEL_LEN, or lower the latter",
        "vllm/config/scheduler.py",
        _whole_prompts,
    ),
)


def _untested(name: str) -> Refuse:
    return Refuse(
        f"version of {name}",
        NPU,
        f"only {' and '.join(TESTED[name])} is in the tested set",
        f"install {name}=={TESTED[name][0]}; the image ascend-a2 or ascend-a3 has it",
        "docs/ascend.md",
        _version(name),
    )


REFUSED: tuple[Row, ...] = (
    Refuse(
        "chip",
        NPU,
        "order-preserving reductions and the invariant kernels exist for Atlas A2 and A3 only",
        "run on an Atlas A2 or A3",
        "CANN envref_07_0099; vllm-ascend csrc/build_batch_invariant_ops.sh",
        _chip,
    ),
    Refuse(
        "CANN",
        NPU,
        f"only {' and '.join(CANN)} is in the tested set",
        f"install CANN {CANN[0]} with NNAL {CANN[0]}, and source its set_env.sh before the start",
        "vllm-ascend docs/source/installation.md",
        _cann,
    ),
    *(_untested(name) for name in TESTED),
    Refuse(
        "MLA and SFA models",
        NPU,
        "their attention has no batch-invariant kernel on Ascend",
        "serve a model with dense attention",
        "vllm-ascend issue 5487",
        _model_has("kv_lora_rank", "index_topk"),
    ),
    Refuse(
        "attention sinks",
        NPU,
        "they use FIA v2, which has no batch-invariant form",
        "serve a model without sinks",
        "vllm_ascend/attention/attention_v1.py",
        _sinks,
    ),
    Refuse(
        "quantized checkpoint",
        NPU,
        "no quantized kernel is proven invariant",
        "serve the unquantized model",
        "vllm-ascend docs, batch_invariance.md (no word of it)",
        _model_has("quantization_config", "quantize"),
    ),
)

ROWS: tuple[Row, ...] = (*COLLECTIVES, *KERNELS, *SCHEDULING, *REFUSED)
