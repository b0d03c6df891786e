"""Reading receipts: one line at a time, whatever the file holds, in memory that does not grow with
it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from server import fingerprint, receiptlog, receipts, signing

MAX_LINE_BYTES = 64 << 20
MAX_TREES = 256  # kept to name what differs; starts of one fingerprint share one
# Lines held back so that they can be taken in another order; whichever limit comes first.
WINDOW_LINES = 4096
WINDOW_BYTES = 32 << 20


@dataclass(slots=True)
class Entry:
    """One line. `fault` says why it can't be used, in the words of `status`: unreadable |
    edited.
    """

    source: int
    line: int
    num_bytes: int
    record: Mapping[str, Any] = field(default_factory=dict)
    status: str = ""
    fault: str = ""


class Reader:
    """The entries of one or more files, in order. `trees` gathers the fingerprint trees that the
    logs' headers name.
    """

    def __init__(self, paths: Iterable[Path], public_key: str | None = None) -> None:
        self.paths = list(paths)
        # Read as far as they reach now: a log that grows meanwhile, perhaps by the very answers
        # of a replay, would never end.
        self.sizes = [path.stat().st_size for path in self.paths]
        self.total_bytes = sum(self.sizes)
        self.trees: dict[str, Mapping[str, Any]] = {}
        self._public_key = public_key

    def entries(self) -> Iterator[Entry]:
        """Raises `OSError` when a file can't be read; never for what a line holds."""
        for source, path in enumerate(self.paths):
            left = self.sizes[source]
            with path.open("rb") as file:
                number = 0
                while left and (raw := file.readline(min(MAX_LINE_BYTES, left))):
                    left -= len(raw)
                    number += 1
                    entry = self._entry(source, number, raw)
                    if entry is not None:
                        yield entry

    def _entry(self, source: int, number: int, raw: bytes) -> Entry | None:
        """None for headers and empty lines."""
        if not raw.strip():
            return None
        entry = Entry(source, number, len(raw))
        try:
            value = json.loads(raw, object_pairs_hook=_object)
        except _Twice as fault:
            return _faulty(entry, "unreadable", f"the key {fault} stands twice in one object")
        except (ValueError, RecursionError):
            return _faulty(entry, "unreadable", "no whole JSON line (cut short?)")
        if not isinstance(value, dict):
            return _faulty(entry, "unreadable", "not an object")
        if value.get("schema") == receiptlog.SCHEMA:
            return self._header(entry, value)
        entry.record = value if "receipt" in value else {"receipt": value}
        try:
            receipts.check_record(entry.record)
        except receipts.BadReceipt as fault:
            readable = isinstance(value.get("receipt", value), dict)
            return _faulty(entry, "edited" if readable else "unreadable", str(fault))
        return self._signed(entry)

    def _header(self, entry: Entry, value: Mapping[str, Any]) -> Entry | None:
        """Keeps the tree, or says that it isn't that of the fingerprint beside it."""
        name, tree = value.get("fingerprint"), value.get("tree")
        try:
            good = isinstance(tree, dict) and fingerprint.short(tree) == name
        except (ValueError, TypeError, RecursionError):
            good = False
        if not good or not isinstance(tree, dict):
            return _faulty(entry, "edited", f"a log's header: its tree is not that of {name!r}")
        if len(self.trees) < MAX_TREES:
            self.trees[str(name)] = tree
        return None

    def _signed(self, entry: Entry) -> Entry:
        receipt = entry.record["receipt"]
        if self._public_key is None and "signature" not in receipt:
            return entry
        wrong = signing.verify(receipt, self._public_key)
        return _faulty(entry, "edited", wrong) if wrong else entry


def digest_of(path: Path, num_bytes: int) -> str:
    """BLAKE3 of a file's first bytes: whether it is still the file that results speak of."""
    hasher = blake3()
    with path.open("rb") as file:
        while num_bytes and (block := file.read(min(num_bytes, 4 << 20))):
            hasher.update(block)
            num_bytes -= len(block)
    return hasher.hexdigest()


class _Twice(ValueError):
    """A key that stands twice in one object: readers differ in which of the two they take."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise _Twice(repr(next(key for key in names if names.count(key) > 1)[:100]))
    return found


def shuffled(entries: Iterable[Entry], rng: random.Random) -> Iterator[Entry]:
    """The entries in another order: each is drawn from a window of the next few thousand, so
    memory stays flat.
    """
    window: list[Entry] = []
    held = 0
    for entry in entries:
        window.append(entry)
        held += entry.num_bytes
        while len(window) > WINDOW_LINES or held > WINDOW_BYTES:
            drawn = _draw(window, rng)
            held -= drawn.num_bytes
            yield drawn
    while window:
        yield _draw(window, rng)


def _draw(window: list[Entry], rng: random.Random) -> Entry:
    index = rng.randrange(len(window))
    window[index], window[-1] = window[-1], window[index]
    return window.pop()


def _faulty(entry: Entry, status: str, fault: str) -> Entry:
    entry.status, entry.fault = status, fault
    return entry
