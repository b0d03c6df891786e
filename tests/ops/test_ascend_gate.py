"""Refuse instead of warn: each fault of a process or an engine is named, and alone enough; with the
refusal taken out, the same fault goes through.
"""

from __future__ import annotations

import sys
import types
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from config import determinism, determinism_ascend
from config.determinism import Force
from ops import bindings_ascend_gate as gate
from ops.registry import NotInstalled


def forced() -> dict[str, str]:
    rows = [r for r in determinism.table("npu") if isinstance(r, Force) and r.kind == "env"]
    return {r.name: r.value for r in rows if r.value is not None}


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, hf_text_config=SimpleNamespace()),
        quant_config=None,
        speculative_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(
            enable_expert_parallel=False,
            data_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=False, scheduler_cls="ops.scheduling.PhaseScheduler"
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE")),
    )


ENGINE = {
    "MLA": ("model_config.use_mla", True),
    "SFA": ("model_config.hf_text_config.index_topk", 2048),
    "sinks": ("model_config.hf_text_config.model_type", "gpt_oss"),
    "quantization": ("quant_config", object()),
    "speculative": ("speculative_config", object()),
    "LoRA": ("lora_config", object()),
    "expert": ("parallel_config.enable_expert_parallel", True),
    "data parallelism": ("parallel_config.data_parallel_size", 2),
    "pipeline": ("parallel_config.pipeline_parallel_size", 2),
    "context": ("parallel_config.decode_context_parallel_size", 2),
    "prefix caching": ("cache_config.enable_prefix_caching", True),
    "chunked prefill": ("scheduler_config.enable_chunked_prefill", True),
    "full graphs": ("compilation_config.cudagraph_mode.name", "FULL_AND_PIECEWISE"),
    "mixes phases": ("scheduler_config.scheduler_cls", None),
}


@pytest.mark.parametrize("what", ENGINE)
def test_one_thing_wrong_in_the_engine_is_one_fault(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gate.engine_faults(config(), SimpleNamespace()) == []
    path, value = ENGINE[what]
    broken = config()
    holder = broken
    *parents, last = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, last, value)
    faults = gate.engine_faults(broken, SimpleNamespace())
    assert len(faults) == 1 and what in faults[0] and "Remedy" in faults[0]
    rest = tuple(row for row in gate.ENGINE if what not in row[0])
    assert len(rest) == len(gate.ENGINE) - 1
    monkeypatch.setattr(gate, "ENGINE", rest)
    assert gate.engine_faults(broken, SimpleNamespace()) == []


def test_every_row_of_the_engine_is_broken_above() -> None:
    assert {row[0] for row in gate.ENGINE} == {
        row[0] for what in ENGINE for row in gate.ENGINE if what in row[0]
    }


ADDITIONAL = """
    weight_nz_mode enable_matmul_allreduce enable_flashcomm1 enable_flashcomm2_parallel_size
    enable_fused_mc2 enable_prefill_mc2 enable_mc2_hierarchy_comm enable_balance_scheduling
    enable_async_exponential enable_reduce_sample enable_shared_expert_dp
    multistream_overlap_shared_expert multistream_overlap_gate enable_kv_nz
    recompute_scheduler_enable
""".split()


def test_every_option_of_vllm_ascend_is_turned_on_below() -> None:
    rows = determinism_ascend.ADDITIONAL.items()
    assert sorted(ADDITIONAL) == sorted(k for k, v in rows if not isinstance(v, dict))


@pytest.mark.parametrize("name", ADDITIONAL)
def test_an_option_of_vllm_ascend_that_came_out_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend = SimpleNamespace(**deepcopy(dict(determinism_ascend.ADDITIONAL)))
    assert gate.engine_faults(config(), ascend) == []
    setattr(ascend, name, 2)
    (fault,) = gate.engine_faults(config(), ascend)
    assert name in fault
    rest = {k: v for k, v in determinism_ascend.ADDITIONAL.items() if k != name}
    monkeypatch.setattr(determinism_ascend, "ADDITIONAL", rest)
    assert gate.engine_faults(config(), ascend) == []


def test_variables_are_read_back_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate.variable_faults(forced()) == []
    for name in forced():
        left = {k: v for k, v in forced().items() if k != name}
        (fault,) = gate.variable_faults(left)
        assert fault.startswith(f"{name}: None")
    (fault,) = gate.variable_faults({**forced(), "HCCL_OP_EXPANSION_MODE": "AIV"})
    assert "HCCL_OP_EXPANSION_MODE: 'AIV'" in fault and "must be unset" in fault
    rows = determinism.table("npu")
    for row in rows:
        if isinstance(row, Force) and row.kind == "env":
            other = {**forced(), row.name: "something else"}
            assert len(gate.variable_faults(other)) == 1
            rest = tuple(kept for kept in rows if kept is not row)
            with monkeypatch.context() as without:
                without.setattr(determinism, "table", lambda _, rest=rest: rest)
                assert gate.variable_faults(other) == []


@pytest.mark.parametrize(
    ("ascendc", "triton", "package", "named"),
    [
        (True, True, True, []),
        (False, True, True, ["batch_invariant_ops"]),
        (True, False, True, ["triton-ascend"]),
        (True, True, False, ["triton-ascend"]),
        (False, False, False, ["batch_invariant_ops", "triton-ascend"]),
    ],
)
def test_a_missing_library_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, ascendc: bool, triton: bool, package: bool, named: list[str]
) -> None:
    fake = types.ModuleType("vllm_ascend")
    fake.batch_invariant = SimpleNamespace(  # type: ignore[attr-defined]
        HAS_ASCENDC_BATCH_INVARIANT=ascendc, HAS_TRITON=triton
    )
    monkeypatch.setitem(sys.modules, "vllm_ascend", fake)
    monkeypatch.setattr(gate, "_missing", lambda _: not package)
    faults = gate.library_faults()
    assert [fault.partition(":")[0] for fault in faults] == named


def test_hccl_has_to_read_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, refused in ((2, False), (1, True), (0, True), (None, True)):
        monkeypatch.setattr(gate, "hccl_deterministic", lambda value=value: value)
        assert bool(gate.hccl_faults(2)) is refused
        assert gate.hccl_faults(1) == []  # nothing is reduced


def test_all_faults_are_in_the_message() -> None:
    gate.refuse([])
    with pytest.raises(NotInstalled, match="one\ntwo"):
        gate.refuse(["one", "two"])
