"""Refusals of the Ascend bindings themselves: expert layers without a kernel, a worker that did not
start through us, and what the layers must not be asked for.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops import bindings_ascend as bind
from ops import bindings_ascend_gate as gate
from ops.registry import NotInstalled

EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    # what -> (options, attributes of the layer, the method has biases)
    "grouped top-k": ({"use_grouped_topk": True}, {}, False),
    "a routing function of its own": ({"custom_routing_function": print}, {}, False),
    "scoring other than softmax": ({"scoring_func": "sigmoid"}, {}, False),
    "a score correction": ({"e_score_correction_bias": torch.zeros(4)}, {}, False),
    "an expert map": ({"expert_map": torch.zeros(4)}, {}, False),
    "weights on the input": ({"apply_router_weight_on_input": True}, {}, False),
    "an activation other than SiLU": ({"activation": "gelu"}, {}, False),
    "expert biases": ({}, {}, True),
    "zero experts": ({}, {"zero_expert_num": 2}, False),
}


@pytest.mark.parametrize("what", EXPERTS)
def test_an_expert_layer_without_a_kernel(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, attributes, has_bias = EXPERTS[what]
    method = SimpleNamespace(moe=SimpleNamespace(has_bias=has_bias))
    layer = SimpleNamespace(**attributes)
    plain = SimpleNamespace(moe=SimpleNamespace(has_bias=False))
    bind._refuse_experts(plain, SimpleNamespace(), {"scoring_func": "softmax"})
    with pytest.raises(NotInstalled, match=f"FusedMoE: {what}: .*Remedy"):
        bind._refuse_experts(method, layer, options)
    rest = tuple(row for row in bind.EXPERTS_REFUSED if row[0] != what)
    monkeypatch.setattr(bind, "EXPERTS_REFUSED", rest)
    bind._refuse_experts(method, layer, options)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A worker of two that has started as it should: every library, HCCL strict."""
    fake = types.ModuleType("vllm_ascend")
    fake.batch_invariant = SimpleNamespace(  # type: ignore[attr-defined]
        HAS_ASCENDC_BATCH_INVARIANT=True, HAS_TRITON=True
    )
    monkeypatch.setitem(sys.modules, "vllm_ascend", fake)
    monkeypatch.setattr(gate, "_missing", lambda _: False)
    monkeypatch.setattr(gate, "hccl_deterministic", lambda: gate.STRICT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setitem(bind._state, "started", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield monkeypatch
    torch.use_deterministic_algorithms(before)


def test_a_worker_that_started_elsewhere(worker: pytest.MonkeyPatch) -> None:
    bind.check_start()
    worker.delitem(bind._state, "started")
    with pytest.raises(NotInstalled, match=r"did not start through Samebits.*Remedy"):
        bind.check_start()


def test_a_worker_whose_torch_is_not_deterministic(worker: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    with pytest.raises(NotInstalled, match=r"use_deterministic_algorithms.*Remedy"):
        bind.check_start()


@pytest.mark.parametrize("reads", [0, 1, None])
def test_a_worker_whose_hccl_is_not_strict(worker: pytest.MonkeyPatch, reads: int | None) -> None:
    worker.setattr(gate, "hccl_deterministic", lambda: reads)
    with pytest.raises(NotInstalled, match=rf"HCCL_DETERMINISTIC={reads}, not strict.*Remedy"):
        bind.check_start()
    worker.setattr(gate, "hccl_faults", lambda _: [])  # the refusal taken out
    bind.check_start()


def test_a_worker_whose_library_is_gone(worker: pytest.MonkeyPatch) -> None:
    sys.modules["vllm_ascend"].batch_invariant.HAS_ASCENDC_BATCH_INVARIANT = False
    with pytest.raises(NotInstalled, match=r"batch_invariant_ops.*Remedy"):
        bind.check_start()
    worker.setattr(gate, "library_faults", list)  # the refusal taken out
    bind.check_start()


def test_every_refused_kind_of_experts_is_above() -> None:
    assert list(EXPERTS) == [name for name, _ in bind.EXPERTS_REFUSED]


def test_rotary_offsets_have_no_kernel() -> None:
    layer = SimpleNamespace(
        is_neox_style=True, cos_sin_cache=torch.ones(4, 8), head_size=8, rotary_dim=8
    )
    where, heads = torch.arange(3), torch.ones(3, 16)
    bind.rotary_layer(layer, where, heads, heads)
    with pytest.raises(NotInstalled, match="offsets"):
        bind.rotary_layer(layer, where, heads, heads, offsets=torch.zeros(3))


def test_swiglu_along_another_dimension_has_no_kernel() -> None:
    with pytest.raises(NotInstalled, match="dim 0"):
        bind.npu_swiglu(torch.zeros(4, 4), dim=0)
