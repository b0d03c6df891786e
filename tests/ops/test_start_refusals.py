"""Refusals on the way into an engine, on any device: the registry, the plugin, the worker's start
on an NPU, the recorder's verdict, and what the server makes of every rank's answer.
"""

from __future__ import annotations

import asyncio
import sys
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from config import determinism_ascend  # noqa: E402
from config.settings import Settings  # noqa: E402
from ops import bindings_ascend as bind  # noqa: E402
from ops import bindings_ascend_check as checks  # noqa: E402
from ops import bindings_ascend_gate as gate  # noqa: E402
from ops import device, recorder, registry  # noqa: E402
from ops.registry import NotInstalled, NotInvariant, Override  # noqa: E402


def nothing() -> None:
    pass


def row(op: str = "aten::mm", kernel: str = "ours", **more: Any) -> Override:
    parts: dict[str, Any] = {"install": nothing, "installed": lambda: True, "check": nothing}
    return Override(op=op, kernel=kernel, reason="", **{**parts, **more})


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", {})


# ---- the registry ----


def test_a_second_owner_in_the_table() -> None:
    first = row()
    registry.install([first])
    registry.install([first])  # the same row again is no second owner
    with pytest.raises(NotInstalled, match="aten::mm: two owners, ours and theirs"):
        registry.install([row(kernel="theirs")])


def test_an_override_that_did_not_bind() -> None:
    with pytest.raises(NotInstalled, match="aten::mm: ours was installed but is not what runs"):
        registry.install([row(installed=lambda: False)])


def test_an_override_that_was_undone_later() -> None:
    bound = [True, False]
    registry.install([row(installed=lambda: bound.pop(0))])
    assert registry.report()["checks"] == {"aten::mm": "ours is no longer bound"}


def test_a_check_that_fails_is_the_ops_answer() -> None:
    def differs() -> None:
        raise NotInvariant("aten::mm: 7 rows: differ")

    registry.install([row(check=differs)])
    assert registry.report()["checks"] == {"aten::mm": "aten::mm: 7 rows: differ"}


# ---- the plugin and the table of a device ----


def test_a_device_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="tpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(NotInstalled, match=r"device 'tpu': no table .*remedy"):
        device.detect()


def test_the_plugin_raises_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM swallows a fault of a plugin's import, never one of its call."""
    from ops import plugin

    monkeypatch.setenv("SAMEBITS_DETERMINISM", "on")
    monkeypatch.setattr(device, "detect", lambda: SimpleNamespace(kind="npu", reason=""))
    monkeypatch.setattr(gate, "process_faults", lambda: ["what is missing. Remedy: this."])
    monkeypatch.setattr(registry, "install", lambda _: None)
    with pytest.raises(NotInstalled, match=r"what is missing\. Remedy"):
        plugin.register()
    assert registry.rows() == ()


def test_an_unknown_mode_of_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    from config.settings import SettingsError
    from ops import plugin

    monkeypatch.setenv("SAMEBITS_DETERMINISM", "maybe")
    monkeypatch.setattr(device, "detect", lambda: SimpleNamespace(kind="cpu", reason=""))
    with pytest.raises(SettingsError, match="SAMEBITS_DETERMINISM=maybe: expected on or off"):
        plugin.register()


# ---- the worker's start on an NPU ----

SOURCES = ("library_faults", "variable_faults", "version_faults")


@pytest.mark.parametrize("source", SOURCES)
def test_a_process_answers_for_all_three(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        said = [f"{name}."] if name == source else []
        monkeypatch.setattr(gate, name, lambda *_, said=said: said)
    assert gate.process_faults() == [f"{source}."]


TESTED = {
    "vllm": "0.23.0",
    "vllm-ascend": "0.23.0.post1",
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post4",
    "triton-ascend": "3.2.2",
}


@pytest.mark.parametrize("what", ["chip", "CANN", *TESTED])
def test_a_worker_reads_versions_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**TESTED, "chip": "A2", "CANN": "9.1.0"}
    monkeypatch.setattr(determinism_ascend, "package_version", lambda name: found[name])
    monkeypatch.setattr(determinism_ascend, "chip", lambda: found["chip"])
    monkeypatch.setattr(determinism_ascend, "cann_version", lambda _: found["CANN"])
    assert gate.version_faults() == []
    found[what] = "0.0.1"
    (fault,) = gate.version_faults()
    assert "0.0.1" in fault and "Remedy" in fault


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vllm-ascend's configuration in a worker, as `start_worker` finds it."""
    made: dict[str, Any] = {"process": [], "engine": []}
    package = types.ModuleType("vllm_ascend")
    config = types.ModuleType("vllm_ascend.ascend_config")
    config.get_ascend_config = lambda: SimpleNamespace(vllm_config=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_ascend", package)
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_config", config)
    monkeypatch.setattr(gate, "process_faults", lambda: made["process"])
    monkeypatch.setattr(gate, "engine_faults", lambda *_: made["engine"])
    monkeypatch.setattr(bind, "_state", {})
    monkeypatch.setattr(bind.torch, "use_deterministic_algorithms", lambda *_, **__: None)
    return made


@pytest.mark.parametrize("where", ["process", "engine"])
def test_a_worker_with_a_fault_does_not_start(where: str, worker: dict[str, Any]) -> None:
    worker[where] = ["what is wrong. Remedy: this."]
    with pytest.raises(NotInstalled, match="what is wrong"):
        bind.start_worker()
    assert "started" not in bind._state
    worker[where] = []
    bind.start_worker()
    assert bind._state["started"]


@pytest.mark.parametrize("asked", ["no", "warn", "strict"])
def test_the_strictest_wish_for_deterministic_algorithms_wins(
    asked: str, worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend issue 14431."""
    said: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: said.append((on, warn_only))
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked != "no")
    monkeypatch.setattr(
        torch, "is_deterministic_algorithms_warn_only_enabled", lambda: asked == "warn"
    )
    bind.start_worker()
    assert said == [(True, asked != "strict")]


# ---- what each rank answers ----


def of_mode(mode: int, kind: str = "npu") -> Any:
    compiled = SimpleNamespace(mode=mode)
    runner = SimpleNamespace(model=object(), device=SimpleNamespace(type=kind))
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compiled), model_runner=runner
    )


def test_a_compiled_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(_ours=set(), seen=set(), floats=set())
    monkeypatch.setattr(recorder, "forward", lambda *_, **__: seen)
    assert recorder.verdict(of_mode(0)) == "ok"
    for kind in ("npu", "cpu"):
        assert "compiled (mode 3)" in recorder.verdict(of_mode(3, kind))


def test_an_op_that_nobody_judged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(_ours=set(), seen={"npu::npu_moe_init_routing"}, floats=set())
    monkeypatch.setattr(recorder, "forward", lambda *_, **__: seen)
    assert "neither overridden nor proven row-wise: npu::npu_moe_init_routing" in recorder.verdict(
        of_mode(0)
    )


GOOD = {"checks": {"aten::mm": "ok"}, "table": [{"op": "aten::mm"}], "hash": "a"}
RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "a failed check": ({"checks": {"aten::mm": "7 rows: differ"}}, "rank 1: aten::mm: 7 rows"),
    "no table": ({"table": []}, "rank 1: no ops of ours are installed"),
    "another table": ({"hash": "b"}, "rank 1: another table of ops than rank 0"),
}


async def answers(ranks: list[dict[str, Any]], _: str) -> list[dict[str, Any]]:
    return ranks


@pytest.mark.parametrize("what", RANKS)
def test_one_rank_that_differs_stops_the_start(what: str) -> None:
    from server.vllm_engine import NotVerified, _verified

    changed, message = RANKS[what]
    fine = SimpleNamespace(collective_rpc=partial(answers, [GOOD, GOOD]))
    assert asyncio.run(_verified(Settings(), fine))["ranks"] == 2
    wrong = SimpleNamespace(collective_rpc=partial(answers, [GOOD, {**GOOD, **changed}]))
    with pytest.raises(NotVerified, match=message):
        asyncio.run(_verified(Settings(), wrong))


def test_ranks_that_cannot_be_asked_stop_the_start() -> None:
    from server.vllm_engine import NotVerified, _verified

    async def gone(_: str) -> Any:
        raise RuntimeError("a rank is gone")

    with pytest.raises(NotVerified, match="could not be checked: a rank is gone"):
        asyncio.run(_verified(Settings(), SimpleNamespace(collective_rpc=gone)))


# ---- the checks of an NPU's ops ----


def test_a_row_that_looks_at_the_others_is_caught() -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    checks.rowwise("planted", lambda rows: rows * 2, x, (1, 2, 16))
    with pytest.raises(NotInvariant, match="planted: first 1 of 16 rows: .* elements differ"):
        checks.rowwise("planted", lambda rows: rows + len(rows) * 1e-3, x, (1, 2, 16))


def test_an_attention_that_answers_no_number_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = types.ModuleType("torch_npu")
    npu.npu_fused_infer_attention_score = (  # type: ignore[attr-defined]
        lambda query, **_: (torch.full_like(query, float("nan")), None)
    )
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    q = torch.zeros(2, 4, 8)
    with pytest.raises(NotInvariant, match="not a number"):
        checks._attend(q, q, q, [2], [2], 4, 4)


def test_an_op_without_any_kernel_is_refused() -> None:
    with pytest.raises(NotInstalled, match="aten::mm: the device has no kernel for it"):
        bind._stock("mm", bind._overload("mm"))
