"""The rows of config/determinism that an NPU has: each is a refusal of its own, seen to fail
without it.

For each row there is one way to break it. With the table as it is the start stops, and the message
names the fault and a remedy; with that one row taken out the same start goes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config import determinism, determinism_ascend
from config.determinism import Conflict, Force, Refuse, Row
from config.settings import Settings

Break = Callable[[Path, pytest.MonkeyPatch], tuple[dict[str, Any], dict[str, str]]]

# What a user might have set, per forced variable; anything that is neither forced nor welcome.
WRONG = {
    "HCCL_DETERMINISTIC": "false",
    "LCCL_DETERMINISTIC": "0",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "HCCL_ALGO": "level0:NA;level1:ring",
    "HCCL_BUFFSIZE": "1024",
    "HCCL_INTER_HCCS_DISABLE": "TRUE",
    "ATB_LLM_LCOC_ENABLE": "2",
    "INF_NAN_MODE_ENABLE": "0",
    "INF_NAN_MODE_FORCE_DISABLE": "1",
    "VLLM_BATCH_INVARIANT": "0",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "2",
    "CLOSE_MATMUL_K_SHIFT": "0",
    "VLLM_ASCEND_ENABLE_NZ": "2",
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": "1",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "1",
    "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": "2",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "1",
    "VLLM_ASCEND_ENABLE_MLAPO": "2",
    "VLLM_ASCEND_BALANCE_SCHEDULING": "1",
    "DYNAMIC_EPLB": "true",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
# Options that are settings of ours, and a value that breaks the promise.
WISHES: dict[str, Any] = {
    "enforce_eager": False,
    "block_size": 64,
    "enable_prefix_caching": True,
}
VERSIONS = {name: tested[0] for name, tested in determinism_ascend.TESTED.items()}


@pytest.fixture(autouse=True)
def tested_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A2 with everything in the tested versions."""
    monkeypatch.setattr(determinism_ascend, "package_version", VERSIONS.get)
    monkeypatch.setattr(determinism_ascend, "chip", lambda: "A2")


def model(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return {"model": str(folder)}


def break_version(name: str) -> Break:
    def broken(_: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
        others = {**VERSIONS, name: "0.0.1"}
        monkeypatch.setattr(determinism_ascend, "package_version", others.get)
        return {}, {}

    return broken


def break_chip(_: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
    monkeypatch.setattr(determinism_ascend, "chip", lambda: "_310P")
    return {}, {}


def break_cann(folder: Path, _: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
    info = folder / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    return {}, {"ASCEND_TOOLKIT_HOME": str(folder)}


REFUSALS: dict[str, Break] = {
    "chip": break_chip,
    "CANN": break_cann,
    **{f"version of {name}": break_version(name) for name in VERSIONS},
    "MLA and SFA models": lambda folder, _: (model(folder, kv_lora_rank=512), {}),
    "attention sinks": lambda folder, _: (model(folder, model_type="gpt_oss"), {}),
    "quantized checkpoint": lambda folder, _: (
        model(folder, quantization_config={"quant_method": "awq"}),
        {},
    ),
    "VLLM_PLUGINS": lambda _f, _m: ({}, {"VLLM_PLUGINS": "another"}),
    "quantization": lambda _f, _m: ({"quantization": "awq"}, {}),
    "whole prompts": lambda _f, _m: ({"max_model_len": 4096, "max_num_batched_tokens": 2048}, {}),
}


def refusable() -> list[Row]:
    """The rows that a user's settings or environment can contradict."""
    rows: list[Row] = []
    for row in determinism.table("npu"):
        if isinstance(row, Refuse) or row.kind == "env" or row.name in Settings.model_fields:
            rows.append(row)
    return rows


def unsettable() -> list[str]:
    """The forced options that are no setting of ours: asking for one is refused by name."""
    known = [row.name for row in refusable()]
    return [row.name for row in determinism.table("npu") if row.name not in known]


def breaking(
    row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Settings, dict[str, str]]:
    if isinstance(row, Refuse):
        wishes, env = REFUSALS[row.name](folder, monkeypatch)
    elif row.kind == "env":
        wishes, env = {}, {row.name: WRONG[row.name]}
    else:
        wishes, env = {row.name: WISHES[row.name]}, {}
    return Settings(**wishes), env


@pytest.mark.parametrize("row", refusable(), ids=lambda row: row.name)
def test_refused_with_the_row_and_only_with_it(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, env = breaking(row, tmp_path, monkeypatch)
    with pytest.raises(Conflict) as refusal:
        determinism.resolve(settings, "npu", env)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 1 and "Remedy:" in lines[0] and row.reason in lines[0]
    for module, name in ((determinism_ascend, "ROWS"), (determinism, "COMMON")):
        rest = tuple(other for other in getattr(module, name) if other is not row)
        monkeypatch.setattr(module, name, rest)
    determinism.resolve(settings, "npu", env)


@pytest.mark.parametrize("name", unsettable())
def test_what_is_no_setting_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from config.settings import SettingsError, load

    monkeypatch.setenv(f"SAMEBITS_{name.upper()}", "2")
    with pytest.raises(SettingsError, match=rf"^SAMEBITS_{name.upper()}=2: unknown setting; .+$"):
        load({"device": "npu"})
    monkeypatch.delenv(f"SAMEBITS_{name.upper()}")
    load({"device": "npu"})


def test_every_row_is_either_of_the_two() -> None:
    rows = determinism.table("npu")
    assert len(rows) == len(refusable()) + len(unsettable())
    assert len(determinism_ascend.ROWS) < len(rows)


def test_a_plain_start_goes_through_and_forces_everything() -> None:
    nnal = {"ATB_MATMUL_SHUFFLE_K_ENABLE": "1", "ATB_LLM_LCOC_ENABLE": "1"}  # set_env.sh's own
    forced = determinism.resolve(Settings(), "npu", nnal)
    assert forced.env["HCCL_DETERMINISTIC"] == "strict"
    assert forced.env["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"
    assert forced.env["HCCL_OP_EXPANSION_MODE"] is None
    assert forced.options["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    assert forced.options["enable_prefix_caching"] is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_devices_take_none_of_it(device: str) -> None:
    assert not [row for row in determinism.table(device) if row in determinism_ascend.ROWS]


@pytest.mark.parametrize("profile", ["ascend-a2", "ascend-a3"])
def test_profiles_start(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from config.settings import load

    monkeypatch.delenv("SAMEBITS_PROFILE", raising=False)
    settings = load({"device": "npu"}, profile=profile)
    determinism.resolve(settings, "npu", {})


def test_every_row_says_why_and_from_where() -> None:
    for row in determinism.table("npu"):
        assert row.reason and row.source and "npu" in row.devices
        if isinstance(row, Force) and row.kind == "env":
            assert WRONG[row.name] not in (row.value, *row.welcome)
