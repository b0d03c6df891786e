"""The results file of a replay: a line per receipt, appended as found, so that a stopped run goes
on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.receiptfile import digest_of

SCHEMA = "samebits.replay-results/1"
COMPLETE = {"complete": True}  # the last line of a run that came to its end


class OtherRun(ValueError):
    """The results file belongs to other receipts or to a server with another fingerprint."""


def is_results(path: Path) -> bool:
    """Whether a file holds the results of a replay: `receipts*.jsonl` names them too."""
    with path.open("rb") as file:
        return SCHEMA.encode() in file.read(len(SCHEMA) + 20)


class Done:
    """Which lines of which file are done: one bit each."""

    def __init__(self) -> None:
        self._bits: dict[int, bytearray] = {}

    def add(self, source: int, line: int) -> None:
        bits = self._bits.setdefault(source, bytearray())
        if line // 8 >= len(bits):
            bits.extend(bytes(max(line // 8 + 1 - len(bits), 4096)))
        bits[line // 8] |= 1 << (line % 8)

    def __contains__(self, place: tuple[int, int]) -> bool:
        source, line = place
        bits = self._bits.get(source, b"")
        return line // 8 < len(bits) and bool(bits[line // 8] & (1 << (line % 8)))


class Results:
    """Open for appending. `sizes` are the bytes of each source that this run reads. Existing lines
    of the same run are read back through `seen`, if it was stopped; a run that came to its end is
    over, and the next one asks everything anew.
    """

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any],
        sizes: Sequence[int],
        *,
        restart: bool,
        seen: Callable[[dict[str, Any]], None],
    ) -> None:
        """Raises `OtherRun` when the file is of another run and `restart` is not set."""
        self.done = Done()
        self.resumed = 0
        self._sources: Sequence[str] = head["sources"]
        mode = "w" if restart or not path.exists() or _is_complete(path) else "a"
        if mode == "a":
            end = self._read_back(path, head, seen)
            os.truncate(path, end)  # a torn last line goes; its receipt is asked again
        self._file = path.open(mode, encoding="utf-8", errors="backslashreplace")
        if self._file.tell() == 0:
            content = {
                name: {"bytes": size, "blake3": digest_of(Path(name), size)}
                for name, size in zip(self._sources, sizes, strict=True)
            }
            self._write({"schema": SCHEMA, **head, "content": content})

    def add(self, result: Mapping[str, Any]) -> None:
        self._write(result)

    def complete(self) -> None:
        """Everything was asked."""
        self._write(COMPLETE)

    def close(self) -> None:
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(_line(value))
        self._file.flush()

    def _read_back(
        self, path: Path, head: Mapping[str, Any], seen: Callable[[dict[str, Any]], None]
    ) -> int:
        """Offset behind the last whole line."""
        end = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file):
                try:
                    value = json.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    value = None
                if not isinstance(value, dict):
                    return end
                end += len(raw)
                if number == 0:
                    _same_run(path, head, value)
                    continue
                try:
                    self.done.add(self._sources.index(value["source"]), value["line"])
                    seen(value)
                except (KeyError, TypeError, ValueError):
                    raise OtherRun(f"{path.name}:{number + 1}: no result of a replay") from None
                self.resumed += 1
        return end


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _is_complete(path: Path) -> bool:
    end = ("\n" + _line(COMPLETE)).encode()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(end)))
        return file.read() == end


def _same_run(path: Path, head: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if found.get("schema") != SCHEMA:
        raise OtherRun(f"{path.name} holds no results of a replay; name another file")
    for key in head:
        if found.get(key) != head[key]:
            raise OtherRun(
                f"{path.name} holds results for {key} {found.get(key)}, this run has {head[key]}: "
                "use --restart to begin anew or --results for another file"
            )
    for name, content in found.get("content", {}).items():
        if digest_of(Path(name), content["bytes"]) != content["blake3"]:
            raise OtherRun(
                f"{path.name} holds results for what {name} held then, and it holds something else "
                "now (rotated?): use --restart to begin anew or --results for another file"
            )
