"""Why the engine's process ended while it started.

vLLM raises "see root cause above" in the server's process and logs the cause in the engine's. That
cause is brought here, so that the last line of a failed start names it.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_FAILED = re.compile(r"engine core initialization failed", re.I)
_KILLED = re.compile(r"Failed core proc.*: -9\b")
KILLED = (
    "memory: the engine's process was killed (signal 9) while it loaded, as the kernel does when "
    "memory runs out; give it more, or lower SAMEBITS_KV_CACHE_MEMORY_BYTES"
)


class LastWords(logging.Handler):
    """Keeps the first exception that vLLM logs, in this process or in one forked from it. A process
    that was spawned anew keeps nothing here: then `cause` is empty.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._file = tempfile.TemporaryFile(buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._file.write((one_line(record.exc_info[1]) + "\n").encode())

    def cause(self, fault: BaseException) -> str:
        """One line on `fault`, which vLLM raised for a start that failed; empty if nothing is
        known.
        """
        if _KILLED.search(str(fault)):
            return KILLED
        if not _FAILED.search(str(fault)):
            return ""
        return os.pread(self._file.fileno(), 2000, 0).decode(errors="replace").partition("\n")[0]

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def heard() -> Iterator[LastWords]:
    """Listen to vLLM's log for as long as the block runs."""
    words, log = LastWords(), logging.getLogger("vllm")
    log.addHandler(words)
    try:
        yield words
    finally:
        log.removeHandler(words)
        words.close()


def one_line(fault: BaseException) -> str:
    """The gist of a library's error: pydantic's wrapping and line breaks taken away."""
    errors = getattr(fault, "errors", None)
    if callable(errors) and (found := errors()):
        return " ".join(str(found[0].get("msg", fault)).split())
    return " ".join(str(fault).split())[:500] or type(fault).__name__
