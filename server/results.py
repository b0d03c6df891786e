"""The results file of a replay: a line per receipt, appended as found, so that a stopped run goes
on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = "samebits.replay-results/1"


class OtherRun(ValueError):
    """The results file belongs to other receipts or to a server with another fingerprint."""


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
    """Open for appending. Existing lines of the same run are read back through `seen`."""

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any],
        *,
        restart: bool,
        seen: Callable[[dict[str, Any]], None],
    ) -> None:
        """Raises `OtherRun` when the file is of another run and `restart` is not set."""
        self.done = Done()
        self.resumed = 0
        self._sources: Sequence[str] = head["sources"]
        mode = "w" if restart or not path.exists() else "a"
        if mode == "a":
            end = self._read_back(path, head, seen)
            os.truncate(path, end)  # a torn last line goes; its receipt is asked again
        self._file = path.open(mode, encoding="utf-8")
        if self._file.tell() == 0:
            self._write({"schema": SCHEMA, **head})

    def add(self, result: Mapping[str, Any]) -> None:
        self._write(result)

    def close(self) -> None:
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
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
                self.done.add(self._sources.index(value["source"]), value["line"])
                self.resumed += 1
                seen(value)
        return end


def _same_run(path: Path, head: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for key in ("sources", "fingerprint"):
        if found.get(key) != head[key]:
            raise OtherRun(
                f"{path.name} holds results for {key} {found.get(key)}, this run has {head[key]}: "
                "use --restart to begin anew or --results for another file"
            )
