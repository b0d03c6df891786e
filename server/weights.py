"""Digests of a model's files: fast (BLAKE3, all cores), and remembered by file identity between
starts.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What decides the token ids of a text, besides the chat template.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".spm", ".bpe")
CHUNK_BYTES = 16 << 20
# A file changed less than this long ago may change again without a new time stamp: its digest is
# not remembered.
RACY_S = 1.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Identity:
    """What tells one state of a file from the next without reading it. `ctime_ns` can't be set by
    ordinary means.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @property
    def key(self) -> str:
        return "|".join(
            str(part)
            for part in (
                self.size,
                self.mtime_ns,
                self.ctime_ns,
                self.inode,
                self.device,
                self.path,
            )
        )


def identity(path: Path) -> Identity:
    """The file's identity, through symbolic links (a hub snapshot is made of them)."""
    real = path.resolve()
    stat = real.stat()
    return Identity(
        str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev
    )


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files that hold weights, by name. Where there are safetensors, `auto` loads them, and
    they count alone; an index beside them says which of them holds what. Of another `load_format`
    everything counts.
    """
    found = sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
    found = [p for p in found if not p.name.startswith("training_args")]
    safetensors = [p for p in found if p.suffix == ".safetensors"]
    if load_format not in ("auto", "safetensors", "hf") or not safetensors:
        safetensors = found
    return safetensors + sorted(folder.glob("*.index.json"))


def code_files(folder: Path) -> list[Path]:
    """Python files that come with a model and run with `trust_remote_code`."""
    return sorted(p for p in folder.glob("*.py") if p.is_file())


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files that are there."""
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    others = {p for suffix in TOKENIZER_SUFFIXES for p in folder.glob(f"*{suffix}")}
    return named + sorted(others - set(named))


def digest(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """BLAKE3 of the file's bytes, 64 hexadecimal digits. `on_bytes` is told how many more were
    read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    # Read, not mapped: a file that is cut short under a mapping kills the process.
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            if on_bytes:
                on_bytes(count)
    return hasher.hexdigest()


def told(say: Callable[[str], None], every_s: float = 3.0) -> Progress:
    """A `Progress` in words, every few seconds: "41 % of 14.2 GB". Quick hashing says nothing."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            say(f"{100 * done / total:.0f} % of {total / 1e9:.1f} GB")

    return progress


class DigestCache:
    """Digests by file identity, in one small JSON file. Losing it costs time, never correctness.

    A damaged or foreign cache file counts as empty. Writes replace the file in one step, so two
    starts at once can't tear it (one of them may lose its entries, and hashes again next time).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = self._read()
        self._dirty = False

    def get(self, file: Identity) -> str | None:
        return self._known.get(file.key)

    def put(self, file: Identity, value: str) -> None:
        age_s = time.time() - max(file.ctime_ns, file.mtime_ns) / 1e9
        if age_s >= RACY_S:
            self._known[file.key] = value
            self._dirty = True

    def save(self) -> None:
        """Write if there is something new. A read-only cache directory is no fault: the next start
        hashes again.
        """
        if self._path is None or not self._dirty:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**self._read(), **self._known}
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(merged, file, indent=0)
            os.replace(temporary, self._path)
            self._dirty = False
        except OSError:
            return

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64}


def digests(
    files: Iterable[Path], cache_path: Path | None = None, progress: Progress | None = None
) -> dict[str, str]:
    """Digest of each file by its name. `progress(done, total)` in bytes, for files not in the
    cache.

    Raises `OSError` when a file can't be read, and `RuntimeError` when one changes while it is
    read.
    """
    cache = DigestCache(cache_path)
    paths = list(files)
    states = [identity(path) for path in paths]
    total = sum(state.size for state in states if cache.get(state) is None)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    result = {}
    for path, state in zip(paths, states, strict=True):
        value = cache.get(state)
        if value is None:
            value = digest(path, advance)
            if identity(path) != state:
                raise RuntimeError(f"{path.name}: changed while it was read")
            cache.put(state, value)
        result[path.name] = value
    cache.save()
    return result
