"""Compiles the C++ kernels once per source, compiler and instruction set, and keeps the result in
the cache folder. An image brings them along compiled (`prebuild`), and needs no compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
COMPILERS = ("g++", "clang++", "c++")
# -ffp-contract=off: each rounding is written in the source; the compiler may not fuse or unfuse
# any.
FLAGS = (
    "-std=c++17 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fvisibility=hidden"
    " -fno-exceptions -fno-rtti -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi"
).split()
ISA_FLAGS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c".split(),
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "neon": [],
}


class NoCompiler(RuntimeError):
    """No usable C++ compiler, or it failed. The message holds what it said."""


def machine_isa() -> str | None:
    """ "avx512", "avx2", "neon", or None where this machine has none of them."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    import torch

    best = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(best)


def source_files() -> list[Path]:
    """What goes into the library, in a fixed order."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def source_hash() -> str:
    """SHA-256 over names and contents of the sources and over the flags; part of the
    fingerprint.
    """
    digest = hashlib.sha256(repr((FLAGS, sorted(ISA_FLAGS.items()))).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> str:
    """Path of the first compiler found. Raises `NoCompiler`."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise NoCompiler(
        f"none of {', '.join(COMPILERS)} is on the PATH; install g++ for the fast kernels"
    )


def cache_dir() -> Path:
    """Where compiled kernels rest: private to this user. Raises `NoCompiler` if somebody else owns
    it.
    """
    from config.settings import cache_dir as home

    path = home() / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as fault:
        raise NoCompiler(
            f"compiled kernels can't be kept in {path} ({fault.strerror}); set SAMEBITS_CACHE_DIR"
        ) from None
    if path.stat().st_uid != os.getuid():
        raise NoCompiler("the cache folder for compiled kernels belongs to another user")
    return path


def prebuilt(isa: str) -> Path | None:
    """The library that `prebuild` made of these very sources, or None."""
    path = PREBUILT / f"kernels-{isa}-{source_hash()[:24]}.so"
    return path if path.is_file() else None


def prebuild(directory: Path = PREBUILT) -> list[Path]:
    """Compile for every instruction set of this architecture, also those that this machine lacks.

    The names hold the sources' hash instead of the compiler's: nothing is looked for at run time.
    Raises `NoCompiler`.
    """
    compiler = find_compiler()
    arm = platform.machine().lower() in ("aarch64", "arm64")
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for isa in ("neon",) if arm else ("avx2", "avx512"):
        library = directory / f"kernels-{isa}-{source_hash()[:24]}.so"
        _compile(compiler, isa, library)
        library.chmod(0o555)
        made.append(library)
    return made


def build(isa: str, directory: Path | None = None) -> Path:
    """The shared library for `isa`: prebuilt, or from the cache, or compiled now. Safe to call from
    many processes at once.

    Raises `NoCompiler` with the compiler's first lines if it can't be made.
    """
    ready = prebuilt(isa) if directory is None else None
    if ready is not None:
        return ready
    compiler = find_compiler()
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    key = hashlib.sha256(f"{source_hash()}|{compiler}|{asked.stdout}|{isa}".encode()).hexdigest()[
        :24
    ]
    directory = directory or cache_dir()
    library = directory / f"kernels-{isa}-{key}.so"
    if library.exists():
        return library
    with open(directory / f"{library.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, isa, library)
    return library


def _compile(compiler: str, isa: str, library: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, *ISA_FLAGS[isa], str(SOURCES / "kernels.cpp"), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            first = "\n".join(done.stderr.splitlines()[:12])
            raise NoCompiler(f"{Path(compiler).name} could not compile the {isa} kernels:\n{first}")
        os.chmod(name, 0o500)
        os.replace(name, library)  # readers see the whole file or none
    finally:
        if os.path.exists(name):
            os.unlink(name)
