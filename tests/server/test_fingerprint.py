"""The fingerprint: what decides bits changes it, what doesn't leaves it, and differences have
names.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from server import fingerprint, machine, weights
from server.receiptlog import ReceiptLog
from tests.server.toy import ToyEngine, app, serving

ENGINE = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "attention_backend": "CPU_ATTN",
    "tensor_parallel_size": 1,
    "enforce_eager": True,
}
OPS = {
    "table": [
        {"op": "aten::linear", "kernel": "native-avx2", "tiles": {"rows": 8}},
        {"op": "vllm.RMSNorm", "kernel": "native-avx2", "tiles": {}},
    ],
    "hash": "h",
}


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "a"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}", "bos": 1}')
    (folder / "README.md").write_text("hello")
    return folder


def tree_of(folder, **changes):
    parts = {
        "engine": ENGINE,
        "ops": OPS,
        "device": {"kind": "cpu", "model": "EPYC", "host_isa": ["x86_64", "avx2"]},
        "forced": {"VLLM_BATCH_INVARIANT": None},
        "sampler": "philox/1",
        "versions": {"vllm": "0.23.0", "torch": "2.11.0"},
        "ops_code": "c" * 64,
    }
    return fingerprint.build_tree(fingerprint.model_part(folder), **{**parts, **changes})


def edit(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FILE_CHANGES = {
    "one weight bit": ("model.safetensors", flip, "weights"),
    "config": ("config.json", lambda d: d.replace(b"8", b"16"), "config.json"),
    "tokenizer": ("tokenizer.json", lambda d: b'{"a": 1}', "tokenizer"),
    "tokenizer_config": ("tokenizer_config.json", lambda d: d.replace(b"1", b"2"), "tokenizer"),
    "chat template": ("tokenizer_config.json", lambda d: d.replace(b"x", b"y"), "chat template"),
}


@pytest.mark.parametrize("what", FILE_CHANGES)
def test_a_file_that_decides_bits_changes_it_and_is_named(model, what):
    before = tree_of(model)
    name, change, word = FILE_CHANGES[what]
    edit(model, name, change)
    after = tree_of(model)
    assert fingerprint.short(before) != fingerprint.short(after)
    found = fingerprint.diff(before, after)
    assert len(found) == 1 and word in found[0].words


OTHER_CHANGES = {
    "dtype": ({"engine": {**ENGINE, "dtype": "float32"}}, "engine option dtype"),
    "quantization": ({"engine": {**ENGINE, "quantization": "fp8"}}, "quantization"),
    "attention": ({"engine": {**ENGINE, "attention_backend": "X"}}, "attention_backend"),
    "tp": ({"engine": {**ENGINE, "tensor_parallel_size": 2}}, "tensor_parallel_size"),
    "vllm": (
        {"versions": {"vllm": "0.24.0", "torch": "2.11.0"}},
        "version of vllm differs: 0.23.0 / 0.24.0",
    ),
    "torch": ({"versions": {"vllm": "0.23.0"}}, "version of torch differs: 2.11.0 / none"),
    "sampler": ({"sampler": "philox/2"}, "sampler"),
    "ops code": ({"ops_code": "d" * 64}, "source code of the ops"),
    "device": (
        {"device": {"kind": "cpu", "model": "Xeon", "host_isa": ["x86_64", "avx2"]}},
        "EPYC / Xeon",
    ),
    "isa": ({"device": {"kind": "cpu", "model": "EPYC", "host_isa": ["x86_64"]}}, "host_isa"),
    "forced": ({"forced": {"VLLM_BATCH_INVARIANT": "1"}}, "VLLM_BATCH_INVARIANT differs: none / 1"),
    "determinism": ({"determinism": "off"}, "determinism"),
    "stock op": ({"ops": {**OPS, "table": OPS["table"][:1]}}, "op vllm.RMSNorm"),
    "kernel": (
        {"ops": {**OPS, "table": [{**OPS["table"][0], "kernel": "torch"}, OPS["table"][1]]}},
        "op aten::linear",
    ),
    "tiles": (
        {"ops": {**OPS, "table": [{**OPS["table"][0], "tiles": {"rows": 4}}, OPS["table"][1]]}},
        "op aten::linear",
    ),
    "table hash": ({"ops": {**OPS, "hash": "i"}}, "table of ops"),
}


@pytest.mark.parametrize("what", OTHER_CHANGES)
def test_everything_else_that_decides_bits(model, what):
    changes, word = OTHER_CHANGES[what]
    before, after = tree_of(model), tree_of(model, **changes)
    assert fingerprint.short(before) != fingerprint.short(after)
    assert any(word in d.words for d in fingerprint.diff(before, after))


def test_what_decides_nothing_leaves_it(model, tmp_path):
    before = fingerprint.short(tree_of(model))
    edit(model, "README.md", lambda _: b"other")
    edit(model, "config.json", lambda _: b'{ "_name_or_path": "b",\n "hidden_size": 8 }')
    (model / "optimizer.txt").write_text("x")
    os.utime(model / "model.safetensors", (1, 1))
    moved = tmp_path / "elsewhere"
    shutil.move(model, moved)
    assert fingerprint.short(tree_of(moved)) == before
    table = list(reversed(OPS["table"]))
    assert not fingerprint.diff(tree_of(moved), tree_of(moved, ops={**OPS, "table": table}))


@pytest.mark.parametrize("name", sorted(fingerprint.NOT_BITS))
def test_scheduling_can_not_get_in(model, name):
    with pytest.raises(ValueError, match=name):
        tree_of(model, engine={**ENGINE, name: 1})


def test_the_tree_is_json_and_comes_back_equal(model):
    tree = tree_of(model)
    again = json.loads(json.dumps(tree))
    assert fingerprint.short(again) == fingerprint.short(tree)
    assert fingerprint.short(tree).startswith("sb1-") and len(fingerprint.short(tree)) == 20
    assert fingerprint.diff(tree, copy.deepcopy(tree)) == []


@pytest.mark.parametrize("eos", [2, [2, 7], None])
def test_tokens_that_end_an_answer_count(model, eos):
    """vLLM ends an answer at generation_config.json's ids, whatever else of that file is unused."""
    described = {"temperature": 0.1, "eos_token_id": 5}
    (model / "generation_config.json").write_text(json.dumps(described))
    before = tree_of(model)
    (model / "generation_config.json").write_text(json.dumps({**described, "temperature": 2}))
    assert fingerprint.short(tree_of(model)) == fingerprint.short(before)
    (model / "generation_config.json").write_text(json.dumps({**described, "eos_token_id": eos}))
    (found,) = fingerprint.diff(before, tree_of(model))
    assert "tokens that end an answer" in found.words


def test_an_index_of_weights_counts(model):
    """It says which file a tensor is read from, where two of them hold it."""
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    before = tree_of(model)
    index.write_text('{"weight_map": {"a": "other.safetensors"}}')
    (found,) = fingerprint.diff(before, tree_of(model))
    assert "weights differ (model.safetensors.index.json)" in found.words


def test_weights_of_another_format_count_where_they_are_loaded(model):
    (model / "pytorch_model.bin").write_bytes(b"x")
    for load_format, counts in [("auto", False), ("safetensors", False), ("pt", True)]:
        (model / "pytorch_model.bin").write_bytes(b"x")
        before = fingerprint.model_part(model, load_format=load_format)
        (model / "pytorch_model.bin").write_bytes(b"y")
        after = fingerprint.model_part(model, load_format=load_format)
        assert (before != after) == counts


def test_a_tokenizer_without_files_is_no_tokenizer(model):
    """A folder that isn't there would leave the tokenizer out of the fingerprint unnoticed."""
    with pytest.raises(RuntimeError, match="no file of a tokenizer"):
        fingerprint.model_part(model, tokenizer_folder=model / "org" / "tokenizer")
    other = model / "words"
    other.mkdir()
    (other / "qwen.tiktoken").write_text("a")
    before = fingerprint.model_part(model, tokenizer_folder=other)
    (other / "qwen.tiktoken").write_text("b")
    assert fingerprint.model_part(model, tokenizer_folder=other) != before


def test_a_context_that_chooses_rotary_factors_counts():
    assert not fingerprint.context_matters({"rope_parameters": {"rope_type": "default"}})
    assert not fingerprint.context_matters({})
    assert not fingerprint.context_matters({"rope_scaling": None})
    assert fingerprint.context_matters({"rope_scaling": {"type": "longrope"}})
    assert fingerprint.context_matters({"text_config": {"rope_scaling": {"rope_type": "dynamic"}}})
    nested = {"rope_parameters": {"full": {"rope_type": "default"}, "slide": {"rope_type": "yarn"}}}
    assert fingerprint.context_matters(nested)


def test_custom_code_counts_when_it_runs(model):
    (model / "modeling_x.py").write_text("a = 1")
    assert "code" not in fingerprint.model_part(model)
    before = fingerprint.model_part(model, trust_remote_code=True)
    (model / "modeling_x.py").write_text("a = 2")
    assert fingerprint.model_part(model, trust_remote_code=True) != before


def test_hashing_beside_loading(model):
    assert fingerprint.start_model_part(model).result() == fingerprint.model_part(model)
    with pytest.raises(OSError):
        fingerprint.start_model_part(model / "absent").result()


class TestCache:
    """Digests are remembered by identity, and by nothing less."""

    def aged(self, monkeypatch):
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 60)

    def count(self, monkeypatch):
        calls = []
        real = weights.digest
        monkeypatch.setattr(weights, "digest", lambda p, f=None: calls.append(p) or real(p, f))
        return calls

    def test_the_second_start_reads_nothing(self, model, tmp_path, monkeypatch):
        self.aged(monkeypatch)
        calls = self.count(monkeypatch)
        cache = tmp_path / "cache" / "digests.json"
        first = weights.digests(weights.weight_files(model), cache)
        assert len(calls) == 1
        assert weights.digests(weights.weight_files(model), cache) == first
        assert len(calls) == 1

    def test_a_flipped_bit_with_restored_times_is_seen(self, model, tmp_path, monkeypatch):
        self.aged(monkeypatch)
        cache = tmp_path / "digests.json"
        path = model / "model.safetensors"
        stat = path.stat()
        first = weights.digests([path], cache)
        with path.open("r+b") as file:
            file.write(b"\x01")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_mtime_ns == stat.st_mtime_ns
        assert weights.digests([path], cache) != first

    def test_a_file_just_written_is_not_remembered(self, model, tmp_path, monkeypatch):
        calls = self.count(monkeypatch)
        cache = tmp_path / "digests.json"
        for _ in range(2):
            weights.digests([model / "model.safetensors"], cache)
        assert len(calls) == 2

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\x00"])
    def test_a_damaged_cache_costs_time_only(self, model, tmp_path, content):
        cache = tmp_path / "digests.json"
        cache.write_text(content)
        plain = weights.digests([model / "model.safetensors"])
        assert weights.digests([model / "model.safetensors"], cache) == plain

    def test_a_read_only_place_is_no_fault(self, model, monkeypatch):
        self.aged(monkeypatch)
        assert weights.digests([model / "model.safetensors"], Path("/proc/none/digests.json"))

    def test_a_file_that_changes_while_it_is_read_stops(self, model, monkeypatch):
        path = model / "model.safetensors"
        real = weights.digest

        def slow(p, f=None):
            value = real(p, f)
            p.write_bytes(b"other")
            return value

        monkeypatch.setattr(weights, "digest", slow)
        with pytest.raises(RuntimeError, match="changed while"):
            weights.digests([path])

    def test_progress_ends_at_the_total(self, model, monkeypatch):
        monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 16)
        told = []
        weights.digests([model / "model.safetensors"], None, lambda d, t: told.append((d, t)))
        size = (model / "model.safetensors").stat().st_size
        assert told[-1] == (size, size) and len(told) == 16

    def test_progress_in_words(self):
        said = []
        told = weights.told(said.append, every_s=0)
        told(1 << 29, 1 << 30)
        assert said == ["50 % of 1.1 GB"]
        weights.told(said.append)(1, 2)
        assert len(said) == 1

    def test_safetensors_count_alone(self, model):
        (model / "pytorch_model.bin").write_bytes(b"x")
        assert [p.name for p in weights.weight_files(model)] == ["model.safetensors"]


def test_cpus_of_both_kinds(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "CPUINFO", info)
    info.write_text("processor: 0\nmodel name : EPYC 9R14\nflags : fpu avx2 fma\n\nprocessor: 1\n")
    assert machine.cpu_model() == "EPYC 9R14"
    assert machine.instruction_set()[1:] == ["avx2", "fma"]
    info.write_text("CPU implementer : 0x41\nCPU part : 0xd40\nFeatures : fp asimd sve\n")
    assert machine.cpu_model() == "implementer 0x41 part 0xd40"
    assert machine.instruction_set()[1:] == ["asimd", "sve"]
    info.unlink()
    assert machine.cpu_model() and machine.instruction_set()


def test_drivers_are_read(tmp_path, monkeypatch):
    nvidia = tmp_path / "version"
    nvidia.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.10  Tue\n")
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", nvidia)
    assert machine.device_facts("cuda", "H200")["driver"] == "570.10"
    monkeypatch.setattr(machine, "ASCEND_ROOT", tmp_path)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=25.2.0\nascendhal_version=7\n")
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "version.cfg").write_text("# x\nruntime_running_version=[9.0.0:9.0]\n")
    facts = machine.device_facts("npu", "Ascend910B1")
    assert facts["driver"] == "25.2.0" and facts["cann"] == "9.0.0:9.0"


def test_the_ops_sources_are_found_without_importing_them():
    assert len(machine.ops_code_digest() or "") == 64


class TestCommand:
    """`samebits fingerprint`."""

    def run(self, capsys, *argv):
        parser = argparse.ArgumentParser()
        fingerprint.add_arguments(parser)
        code = fingerprint.run(parser.parse_args(list(argv)))
        return code, capsys.readouterr()

    def test_of_a_running_server(self, tmp_path, capsys):
        engine = ToyEngine()
        with serving(app(engine)) as url:
            code, said = self.run(capsys, "--base-url", url + "/v1", "--save", str(tmp_path / "a"))
            assert code == 0 and said.out.startswith(engine.fingerprint)
            code, said = self.run(capsys, "--diff", url, str(tmp_path / "a"))
            assert code == 0 and "the same" in said.out
        with serving(app(ToyEngine(dtype="float32"))) as url:
            code, said = self.run(capsys, "--diff", str(tmp_path / "a"), url)
        assert code == 1 and "engine option dtype differs: bfloat16 / float32" in said.out

    def test_of_a_receipts_log(self, tmp_path, capsys):
        engine = ToyEngine()
        header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
        ReceiptLog(tmp_path / "log.jsonl", header, max_bytes=1 << 20).close()
        (tmp_path / "tree.json").write_text(json.dumps(engine.fingerprint_tree, indent=2))
        code, _ = self.run(
            capsys, "--diff", str(tmp_path / "log.jsonl"), str(tmp_path / "tree.json")
        )
        assert code == 0

    @pytest.mark.parametrize("content", ["", "{}", "[1]", "\x00", '{"schema": "other"}'])
    def test_sources_that_hold_none(self, tmp_path, capsys, content):
        (tmp_path / "x").write_text(content)
        code, said = self.run(capsys, "--diff", str(tmp_path / "x"), str(tmp_path / "absent"))
        assert code == 2 and str(tmp_path / "x") in said.err
        assert self.run(capsys, "--base-url", "http://127.0.0.1:9")[0] == 2
