"""The rows of config/determinism that an NPU has: each is a refusal of its own, seen to fail
without it.

For each row there is one way to break it, written down here and not read from the table, so that a
row that is lost fails its test. With the table as it is the start stops, and the message names the
fault and a remedy; with that one row taken out the same start goes through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config import determinism, determinism_ascend
from config.determinism import Conflict, Force, Row
from config.settings import Settings

CANN_VERSION = determinism_ascend.cann_version
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
# Options that are no setting of ours: asking for one is refused by name. What each remedy says.
NOT_OFFERED = {
    "generation_config": "leave it out",
    "logprobs_mode": "leave it out",
    "structured_outputs_config": "leave it out",
    "disable_cascade_attn": "leave it out",
    "disable_custom_all_reduce": "leave it out",
    "speculative_config": "serve the model without a draft",
    "enable_lora": "merge the adapter into the weights",
    "additional_config": "leave it out",
    "compilation_config": "serve without graphs",
    "attention_backend": "leave it out",
    "scheduler_cls": "leave it out",
    "enable_chunked_prefill": "SAMEBITS_MAX_NUM_BATCHED_TOKENS",
    "async_scheduling": "leave it out",
    "enable_expert_parallel": "SAMEBITS_TENSOR_PARALLEL_SIZE",
    "prefill_context_parallel_size": "SAMEBITS_TENSOR_PARALLEL_SIZE",
    "decode_context_parallel_size": "SAMEBITS_TENSOR_PARALLEL_SIZE",
    "data_parallel_size": "run one server per replica",
    "pipeline_parallel_size": "SAMEBITS_TENSOR_PARALLEL_SIZE",
}
# Keys of such options, which someone may take for settings too.
KEYS = {
    "cudagraph_mode": "serve without graphs",
    "enable_flashcomm1": "leave it out",
    "enable_matmul_allreduce": "leave it out",
    "enable_fused_mc2": "leave it out",
    "fuse_allreduce_rms": "leave it out",
}
VERSIONS = {
    "vllm": "0.23.0",
    "vllm-ascend": "0.23.0.post1",
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post4",
    "triton-ascend": "3.2.2",
}


@pytest.fixture(autouse=True)
def tested_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A2 with everything in the tested versions."""
    monkeypatch.setattr(determinism_ascend, "package_version", VERSIONS.get)
    monkeypatch.setattr(determinism_ascend, "chip", lambda: "A2")
    monkeypatch.setattr(determinism_ascend, "cann_version", lambda _: "9.1.0")


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


def break_cann(_: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
    monkeypatch.setattr(determinism_ascend, "cann_version", lambda _: "8.5.0")
    return {}, {}


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


def row_of(name: str, kind: str) -> Row | None:
    """The row of that name; None if the table has lost it."""
    for row in determinism.table("npu"):
        if row.name == name and getattr(row, "kind", "refuse") == kind:
            return row
    return None


def breaking(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Settings, dict[str, str]]:
    if kind == "refuse":
        wishes, env = REFUSALS[name](folder, monkeypatch)
        return Settings(**wishes), env
    if kind == "env":
        return Settings(), {name: WRONG[name]}
    return Settings(**{name: WISHES[name]}), {}


BROKEN = [
    *((name, "env") for name in WRONG),
    *((name, "option") for name in WISHES),
    *((name, "refuse") for name in REFUSALS),
]


@pytest.mark.parametrize(("name", "kind"), BROKEN)
def test_refused_with_the_row_and_only_with_it(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of(name, kind)
    settings, env = breaking(name, kind, tmp_path, monkeypatch)
    with pytest.raises(Conflict) as refusal:
        determinism.resolve(settings, "npu", env)
    assert row is not None
    lines = str(refusal.value).splitlines()
    assert len(lines) == 1 and "Remedy:" in lines[0] and row.reason in lines[0]
    for module, rows in ((determinism_ascend, "ROWS"), (determinism, "COMMON")):
        rest = tuple(other for other in getattr(module, rows) if other is not row)
        monkeypatch.setattr(module, rows, rest)
    determinism.resolve(settings, "npu", env)


@pytest.mark.parametrize(("name", "remedy"), {**NOT_OFFERED, **KEYS}.items())
def test_what_is_no_setting_is_refused_by_name(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from config.settings import SettingsError, load
    from server import cli

    monkeypatch.setenv(f"SAMEBITS_{name.upper()}", "2")
    said = rf"SAMEBITS_{name.upper()}=2: no setting here: \S.+\. Remedy: (?P<remedy>.+)\."
    with pytest.raises(SettingsError) as refusal:
        load({"device": "npu"})
    found = re.fullmatch(said, str(refusal.value))
    assert found and remedy in found["remedy"]
    monkeypatch.delenv(f"SAMEBITS_{name.upper()}")
    load({"device": "npu"})
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", flag, "2"])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{flag}: no setting here: " in last and f"Remedy: {found['remedy']}." in last


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_no_setting_is_forced(name: str) -> None:
    """Whatever vLLM's own default is, now or later."""
    (row,) = (r for r in determinism.table("npu") if r.name == name)
    options = determinism.resolve(Settings(), "npu", {}).options
    assert isinstance(row, Force) and options[name] == row.value


# What issue and page promise to refuse: how someone would ask for it, and what the line must say.
PROMISED: dict[str, tuple[str, dict[str, str], str]] = {
    "AIV": ("", {"HCCL_OP_EXPANSION_MODE": "AIV"}, "unset it"),
    "full graphs": ("", {"SAMEBITS_COMPILATION_CONFIG": "{...}"}, "serve without graphs"),
    "graphs": ("", {"SAMEBITS_ENFORCE_EAGER": "false"}, "unset it"),
    "flashcomm": ("", {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}, "unset it"),
    "flashcomm 2": ("", {"VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": "2"}, "unset it"),
    "fused matmul-all-reduce": ("", {"VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": "1"}, "unset it"),
    "fused MC2": ("", {"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}, "unset it"),
    "INF/NaN mode off": ("", {"INF_NAN_MODE_ENABLE": "0"}, "unset it"),
    "INF/NaN mode forced off": ("", {"INF_NAN_MODE_FORCE_DISABLE": "1"}, "unset it"),
    "context parallel": (
        "",
        {"SAMEBITS_DECODE_CONTEXT_PARALLEL_SIZE": "2"},
        "SAMEBITS_TENSOR_PARALLEL_SIZE",
    ),
    "expert parallel": (
        "",
        {"SAMEBITS_ENABLE_EXPERT_PARALLEL": "1"},
        "SAMEBITS_TENSOR_PARALLEL_SIZE",
    ),
    "speculative decoding": ("", {"SAMEBITS_SPECULATIVE_CONFIG": "{...}"}, "without a draft"),
    "MLA models": ("MLA and SFA models", {}, "serve a model with dense attention"),
    "sinks": ("attention sinks", {}, "serve a model without sinks"),
    "quantization": ("", {"SAMEBITS_QUANTIZATION": "awq"}, "serve the unquantized model"),
    "quantized checkpoints": ("quantized checkpoint", {}, "serve the unquantized model"),
    "other chips": ("chip", {}, "run on an Atlas A2 or A3"),
    "another CANN": ("CANN", {}, "install CANN 9.1.0"),
    "another vllm-ascend": ("version of vllm-ascend", {}, "install vllm-ascend==0.23.0.post1"),
    "another torch-npu": ("version of torch-npu", {}, "install torch-npu==2.10.0.post4"),
    "another triton-ascend": ("version of triton-ascend", {}, "install triton-ascend==3.2.2"),
}


@pytest.mark.parametrize("what", PROMISED)
def test_a_refused_start_says_one_line_with_the_remedy(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command, as a person would see it."""
    from server import cli, logs, vllm_start

    def through(*_: Any) -> None:
        raise vllm_start.StartFault("the start goes through")

    row, env, remedy = PROMISED[what]
    wishes, more = REFUSALS[row](tmp_path, monkeypatch) if row else ({}, {})
    for name, value in {**env, **more}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logs, "configure", lambda _: None)
    monkeypatch.setattr(cli.gc, "disable", lambda: None)
    monkeypatch.setattr(determinism, "export", lambda _: None)
    monkeypatch.setattr(vllm_start, "check_machine", through)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in wishes.items()]
    assert cli.main(["serve", "--device", "npu", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    before, _, after = line.partition(" Remedy: ")
    assert line.startswith("samebits: ") and ": " in before.removeprefix("samebits: ")
    assert remedy in after and after.endswith(".")


@pytest.mark.parametrize("how", ["not set", "no file", "other", "tested"])
def test_the_version_of_cann_is_read_or_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism_ascend, "cann_version", CANN_VERSION)
    env = {} if how == "not set" else {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    if how in ("other", "tested"):
        info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
        info.parent.mkdir()
        version = "9.1.0" if how == "tested" else "8.5.0"
        info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\n")
    faults = determinism.check(Settings(), "npu", env)
    said = {"other": "CANN 8.5.0", "tested": ""}.get(how, "no version to be read")
    assert bool(faults) is bool(said)
    assert all(said in fault and "source its set_env.sh" in fault for fault in faults)


def test_every_row_is_broken_above() -> None:
    rows = [(row.name, getattr(row, "kind", "refuse")) for row in determinism.table("npu")]
    assert sorted(rows) == sorted([*BROKEN, *((name, "option") for name in NOT_OFFERED)])


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
