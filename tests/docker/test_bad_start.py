"""A start that can't go on says so in one line that names the cause and the remedy: the table of
docs/deploy.md, row by row, without torch and without root's blindness to modes.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from config.settings import Settings, load
from server import examination, machine, vllm_start
from server.vllm_start import StartFault, check_gpu, check_machine, resolve_model

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """An ordinary user for a while: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def one_line(caught: pytest.ExceptionInfo[StartFault], *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 2
    for word in words:
        assert word in text, text


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A folder that any user reaches."""
    for each in (tmp_path, *tmp_path.parents[:3]):
        if each.stat().st_uid == os.getuid() and each != Path("/tmp"):
            each.chmod(0o755)
    return tmp_path


# --- what is looked at before the model is loaded


def test_a_misspelt_setting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve"],
        env={**os.environ, "SAMEBITS_MAX_NUM_SEQ": "3"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1
    assert "SAMEBITS_MAX_NUM_SEQ=3" in lines[0] and "did you mean SAMEBITS_MAX_NUM_SEQS" in lines[0]


def test_an_unreadable_model_volume(open_path: Path) -> None:
    folder = open_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    folder.chmod(0o000)
    with as_nobody(), pytest.raises(StartFault) as caught:
        resolve_model(Settings(model=str(folder)))
    folder.chmod(0o755)
    one_line(caught, str(folder), "can't be read by user", "correct its owner or mode")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_unreadable_file_of_a_model(open_path: Path, name: str) -> None:
    folder = open_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"x" * 64)
    (folder / name).chmod(0o000)
    with as_nobody(), pytest.raises(StartFault) as caught:
        resolve_model(Settings(model=str(folder)))
    one_line(caught, str(folder), name, "can't be read")


def test_a_read_only_cache(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = open_path / "cache"
    home.mkdir(mode=0o555)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(home))
    with as_nobody(), pytest.raises(StartFault) as caught:
        check_machine(Settings(), "cpu")
    one_line(caught, str(home), "set SAMEBITS_CACHE_DIR to a folder that user")


def test_a_cache_that_can_be_written_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "new"))
    check_machine(Settings(), "cpu")
    assert list((tmp_path / "new").iterdir()) == []


def test_too_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    docker = shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_start.shutil, "disk_usage", lambda _: docker)
    check_machine(Settings(), "cpu")  # one rank needs none
    with pytest.raises(StartFault) as caught:
        check_machine(Settings(tensor_parallel_size=2), "cpu")
    one_line(caught, "/dev/shm has 64 MiB", "--shm-size=1g")


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "memory_limit", lambda: 1536 << 20)
    with pytest.raises(StartFault) as caught:
        check_machine(Settings(), "cpu")
    one_line(caught, "1536 MiB", "2048", "SAMEBITS_KV_CACHE_MEMORY_BYTES")
    check_machine(Settings(kv_cache_memory_bytes=256 << 20), "cpu")


@pytest.mark.parametrize(
    ("limit", "used", "counters", "reclaimable", "none"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file", "max"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
            str(2**63 - 4096),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_memory_limit_is_the_control_groups(
    limit: str,
    used: str,
    counters: str,
    reclaimable: str,
    none: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where control groups are of version 1: there Docker's -m went unseen, and the kernel
    killed the engine half-way.
    """
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free, physical = examination.free_memory(), machine.memory_limit()
    assert machine.control_group() is None
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / used).write_text("900000\n")
    (tmp_path / counters).write_text(f"anon 500000\n{reclaimable} 300000\n")
    (tmp_path / limit).write_text(none + "\n")
    assert machine.memory_limit() == physical
    assert examination.free_memory() == pytest.approx(free, rel=0.5)
    (tmp_path / limit).write_text("1000000\n")
    assert machine.memory_limit() == 1000000
    assert examination.free_memory() == 400000, "what the kernel may take back counts as free"


def failed_start(monkeypatch: pytest.MonkeyPatch, said: str, logged: str | None) -> Exception:
    """What `build` raises when the engine's process, a fork of this one, logs an exception and
    ends, and vLLM raises what it raises then.
    """

    def dies(_: object) -> None:
        child = os.fork()
        if not child:
            try:
                raise ValueError(logged or "")
            except ValueError:
                if logged:
                    logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start")
            os._exit(1)
        os.waitpid(child, 0)
        raise RuntimeError(said)

    llm = SimpleNamespace(AsyncLLM=SimpleNamespace(from_vllm_config=dies))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)  # type: ignore[arg-type]
    made = SimpleNamespace(create_engine_config=lambda: None)
    monkeypatch.setattr(vllm_start, "engine_args", lambda _: made)
    start = SimpleNamespace(settings=Settings(determinism="off"), device="npu")
    handlers = list(logging.getLogger("vllm").handlers)
    with pytest.raises(RuntimeError) as caught:
        vllm_start.build(start)  # type: ignore[arg-type]
    assert logging.getLogger("vllm").handlers == handlers
    return caught.value


FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): "


def test_an_engine_that_was_killed_while_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = failed_start(monkeypatch, FAILED + "{'EngineCore': -9}", None)
    assert isinstance(fault, StartFault) and "\n" not in str(fault)
    assert "memory" in str(fault) and "SAMEBITS_KV_CACHE_MEMORY_BYTES" in str(fault)


def test_the_cause_is_brought_from_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own words are "see root cause above", below a long traceback."""
    cause = "0.18 GiB KV cache is needed.\nTry decreasing max_model_len"
    fault = failed_start(monkeypatch, FAILED + "{}", cause)
    assert type(fault) is StartFault and str(fault) == cause.replace("\n", " ")


@pytest.mark.parametrize(("said", "logged"), [(FAILED + "{}", None), ("other", "a warning's")])
def test_an_error_of_which_nothing_is_known_stays_itself(
    said: str, logged: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = failed_start(monkeypatch, said, logged)
    assert type(fault) is RuntimeError and str(fault) == said


# --- cuda


def test_cuda_without_its_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "package_version", lambda _: None)
    with pytest.raises(StartFault) as caught:
        check_gpu()
    one_line(caught, "no CUDA build of vllm", "samebits:cuda")


def test_cuda_without_device_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "package_version", lambda _: "0.23.0")
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(StartFault) as caught:
        check_gpu(nodes=str(tmp_path))
    one_line(caught, "no NVIDIA GPU", "--gpus all", "SAMEBITS_DEVICE=cpu")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 2024",
            "535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build",
            "570.124.06",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release", None),
    ],
)
def test_cuda_with_a_driver_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    monkeypatch.setattr(vllm_start, "package_version", lambda _: "0.23.0")
    (tmp_path / "nvidia0").touch()
    module = tmp_path / "version"
    module.write_text(f"{text}\nGCC version:  gcc version 12.3.0\n")
    if version is None:
        check_gpu(nodes=str(tmp_path), module=module)
        return
    with pytest.raises(StartFault) as caught:
        check_gpu(nodes=str(tmp_path), module=module)
    one_line(caught, f"driver {version} is too old", "580")


def test_the_settings_of_every_profile_load() -> None:
    for name in ("cpu", "cuda", "ascend-a2", "ascend-a3"):
        load(profile=name)


# --- ascend: the entry point of the image, on a file system of its own

NODES = ("davinci0", "davinci_manager", "devmm_svm", "hisi_hdc")
FILES = (
    "usr/local/Ascend/driver/lib64/libdrvdsmi_host.so",
    "usr/local/Ascend/driver/version.info",
    "usr/local/Ascend/ascend-toolkit/set_env.sh",
    "usr/local/Ascend/nnal/atb/set_env.sh",
)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """All that an Ascend container should have, empty."""
    for name in (*(f"dev/{node}" for node in NODES), *FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / FILES[2]).write_text("export FROM_CANN=1\n")
    return tmp_path


def on_ascend(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "on_ascend.sh"), *command],
        env={"PATH": os.environ["PATH"], "ON_ASCEND_ROOT": str(root)},
        capture_output=True,
        text=True,
    )


def test_ascend_entry_becomes_the_command(host: Path) -> None:
    done = on_ascend(host, "bash", "-c", 'echo "$FROM_CANN"; exit 7')
    assert (done.returncode, done.stdout, done.stderr) == (7, "1\n", "")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("dev/davinci0", "no Ascend card in this container"),
        ("dev/davinci_manager", "--device /dev/davinci_manager"),
        ("dev/devmm_svm", "--device /dev/devmm_svm"),
        ("dev/hisi_hdc", "--device /dev/hisi_hdc"),
        ("usr/local/Ascend/driver/lib64", "-v /usr/local/Ascend/driver/lib64"),
        ("usr/local/Ascend/driver/version.info", "-v /usr/local/Ascend/driver/version.info"),
        (FILES[2], "the image has no CANN"),
        (FILES[3], "no NNAL"),
    ],
)
def test_ascend_entry_refuses(host: Path, missing: str, words: str) -> None:
    path = host / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = on_ascend(host, "echo", "started")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr


# --- ascend: the operator library at build time


def install_library(root: Path, installer: str, soc: str = "ascend910b") -> tuple[int, str]:
    script = root / "vllm-workspace/vllm-ascend/csrc/build_batch_invariant_ops.sh"
    script.parent.mkdir(parents=True)
    script.write_text(installer)
    modules = root / "modules"
    modules.mkdir()
    done = subprocess.run(
        ["bash", str(ROOT / "docker" / "ascend_library.sh"), soc, str(root)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(modules), "MODULES": str(modules)},
        capture_output=True,
        text=True,
        cwd=root,
    )
    return done.returncode, done.stdout + done.stderr


def test_ascend_build_installs_the_library(host: Path) -> None:
    code, said = install_library(host, 'touch "$MODULES/batch_invariant_ops.py"\n')
    assert code == 0 and said.splitlines()[-1] == "batch_invariant_ops is there"


def test_ascend_build_fails_without_the_library(host: Path) -> None:
    """As upstream's installer does it: a failed download is logged, and the exit code is 0."""
    code, said = install_library(host, "echo 'Download failed, skipping'\n")
    assert code == 1 and "could not be installed: no image" in said
    assert said.count("did not install everything") == 3


def test_ascend_build_names_the_chips_it_knows(host: Path) -> None:
    code, said = install_library(host, "", soc="ascend310")
    assert code == 1 and "SOC=ascend310" in said
