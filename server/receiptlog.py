"""The receipts log: JSON lines, appended so that a crash, a full disk or a second process never
spoils a line.

Each line leaves in one write on an O_APPEND descriptor, under an exclusive lock. If less than the
whole line fits, the file is cut back to where it was. A torn tail (power lost within a line) is
closed with a line feed at the next start: readers count it as one unreadable line. The first line
of every file names the fingerprint and its tree, so that a replay can say *what* differs. Rotation
renames; nothing is ever deleted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = "samebits.log/1"
FREE_BYTES = 1 << 20  # after a failed write, the log is tried again once this much is free

_log = logging.getLogger("samebits.receipts")


class LogFailed(OSError):
    """The line could not be appended; the file is as it was before."""


class ReceiptLog:
    """One open log. `append` blocks for a write, and for an fsync if `syncs`; threads take
    turns.
    """

    def __init__(
        self, path: str | Path, header: Mapping[str, Any], *, max_bytes: int, fsync: bool = False
    ) -> None:
        """Open or create. Raises `OSError` when the place can't be written."""
        self.path = Path(path)
        self.failed: str | None = None
        self._header = _line({"schema": SCHEMA, **header})
        self._max_bytes = max_bytes
        self.syncs = fsync
        self._stuck = False  # rotation failed and was said to
        self._file = -1
        self._turn = threading.Lock()
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """One line, whole or not at all. Raises `LogFailed` with the reason; `failed` then holds
        it too.
        """
        line = _line(record)
        try:
            with self._turn:
                self._follow()
                self._lock_and_write(line)
                if self.syncs:
                    os.fsync(self._file)
        except OSError as fault:
            self.failed = f"{self.path.name}: {fault.strerror or fault}"
            raise LogFailed(self.failed) from None
        self.failed = None

    def recovered(self) -> bool:
        """After a failure: whether it is worth trying again (there is room, the place is still
        there).
        """
        if self.failed is None:
            return True
        try:
            stat = os.statvfs(self.path.parent)
        except OSError:
            return False
        return stat.f_bavail * stat.f_frsize >= FREE_BYTES

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self.close()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o640)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._write(self._ending() + self._header)
        except OSError:
            self.close()  # unlocks too; the next append opens anew, so no file starts headless
            raise
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _follow(self) -> None:
        """Rotate when full; reopen when another process has rotated or someone has moved the
        file.
        """
        if self._file < 0:
            self._open()
            return
        stat = os.fstat(self._file)
        try:
            there = self.path.stat()
            moved = (there.st_ino, there.st_dev) != (stat.st_ino, stat.st_dev)
        except FileNotFoundError:
            moved = True
        if not moved and stat.st_size >= max(self._max_bytes, 2 * len(self._header)):
            moved = self._rotated()
        if moved:
            self._open()

    def _rotated(self) -> bool:
        """Rotate, unless another process has done so meanwhile; False where it can't be done: a
        log that grows on loses nothing.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            mine, there = os.fstat(self._file), self.path.stat()
            if (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev):
                self._rotate()
        except FileNotFoundError:
            pass
        except OSError as fault:
            if not self._stuck:
                self._stuck = True
                _log.warning("%s can't be rotated (%s); it grows on", self.path, fault.strerror)
            return False
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def _rotate(self) -> None:
        """Rename to the first free `name-YYYYmmddTHHMMSS[-n].jsonl`. The lock is held and the
        path is ours, so that no other process takes the same name meanwhile.
        """
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        for attempt in range(1000):
            tail = f"-{attempt}" if attempt else ""
            target = self.path.with_name(f"{self.path.stem}-{stamp}{tail}{self.path.suffix}")
            if os.path.lexists(target):
                continue
            os.rename(self.path, target)
            _log.info("%s rotated to %s", self.path.name, target.name)
            return
        raise OSError(f"{self.path.name}: no free name to rotate to")

    def _lock_and_write(self, line: bytes) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._write(self._ending() + line)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _ending(self) -> bytes:
        """A line feed where the file ends within a line: whoever wrote there was killed. The lock
        is held.
        """
        size = os.fstat(self._file).st_size
        if not size or os.pread(self._file, 1, size - 1) == b"\n":
            return b""
        _log.warning("%s ends within a line (a crash?): closed it", self.path)
        return b"\n"

    def _write(self, line: bytes) -> None:
        """All of it in one write, or cut back and raise. The lock is held."""
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
        except OSError:
            os.ftruncate(self._file, before)
            raise
        if written != len(line):
            os.ftruncate(self._file, before)
            raise OSError(28, "No space left on device")


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"
