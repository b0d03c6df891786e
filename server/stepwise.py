"""Large JSON in short steps, for a thread beside the event loop.

Python's parser holds the interpreter for a whole body: 4 MiB of token ids stop the loop for a third
of a second. This reader takes single texts and numbers from the same parser, and lists of numbers a
slice at a time, and steps aside in between. What is nested too deeply or holds too many entries is
refused where that shows, before the rest is read.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from server.errors import InvalidRequest

SLICE_CHARS = 16 << 10  # about a millisecond of parsing
ENTRIES_PER_STEP = 256
PAUSE_S = 0.0005

_space = re.compile(r"[ \t\n\r]*").match
_end = re.compile(r"[,\]} \t\n\r]").search
_string: Callable[[str, int, bool], tuple[str, int]] = scanstring  # 4 MiB of escapes: 10 ms


class Reader:
    """Reads one text. `decoder(piece)` gives a parser with the hooks that a piece of it needs;
    `pairs` makes an object of its keys and values.
    """

    def __init__(
        self,
        text: str,
        *,
        decoder: Callable[[str], json.JSONDecoder],
        pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]],
        max_depth: int,
        max_entries: int,
    ) -> None:
        self._text, self._decoder, self._pairs = text, decoder, pairs
        self._max_depth, self._max_entries = max_depth, max_entries
        self._depth = self._entries = 0
        self._field = ""  # the key of the body whose value is being read

    def read(self) -> Any:
        """The value. Raises `json.JSONDecodeError`, or `InvalidRequest` on what is too much."""
        value, at = self._value(self._skip(0))
        at = self._skip(at)
        if at != len(self._text):
            raise self._fault("Extra data", at)
        return value

    def _value(self, at: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        if first in ("{", "["):
            self._depth += 1
            if self._depth > self._max_depth:
                raise InvalidRequest(f"the body is nested deeper than {self._max_depth} levels")
            found = self._object(at + 1) if first == "{" else self._array(at + 1)
            self._depth -= 1
            return found
        if first == '"':
            return _string(self._text, at + 1, True)
        return self._scalar(at)

    def _scalar(self, at: int) -> tuple[Any, int]:
        mark = _end(self._text, at)
        end = mark.start() if mark else len(self._text)
        piece = self._text[at:end]
        try:
            return self._decoder(piece).decode(piece), end
        except json.JSONDecodeError as fault:
            raise self._fault(fault.msg, at + fault.pos) from None

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        pairs: list[tuple[str, Any]] = []
        at = self._skip(at)
        if self._text[at : at + 1] == "}":
            return self._pairs(pairs), at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise self._fault("Expecting property name enclosed in double quotes", at)
            key, at = _string(self._text, at + 1, True)
            if self._depth == 1:
                self._field = key
            self._count()
            at = self._skip(at)
            if self._text[at : at + 1] != ":":
                raise self._fault("Expecting ':' delimiter", at)
            value, at = self._value(self._skip(at + 1))
            pairs.append((key, value))
            at, ended = self._next(at, "}")
            if ended:
                return self._pairs(pairs), at

    def _array(self, at: int) -> tuple[list[Any], int]:
        end = self._text.find("]", at)
        if end >= 0 and all(self._text.find(c, at, end) < 0 for c in '"[{'):
            return self._plain(at, end), end + 1
        values: list[Any] = []
        at = self._skip(at)
        while True:
            self._count()
            value, at = self._value(at)
            values.append(value)
            at, ended = self._next(at, "]")
            if ended:
                return values, at

    def _plain(self, at: int, end: int) -> list[Any]:
        """A list of numbers and constants, from after its bracket to before its end."""
        values: list[Any] = []
        while True:
            cut = self._text.find(",", min(at + SLICE_CHARS, end), end)
            piece = self._text[at : cut if cut >= 0 else end]
            try:
                found = self._decoder(piece).decode(f"[{piece}]")
            except json.JSONDecodeError as fault:
                raise self._fault(fault.msg, at + fault.pos - 1) from None
            if not found and (values or cut >= 0):
                raise self._fault("Expecting value", at)
            if cut < 0 and not values:
                return found  # type: ignore[no-any-return]
            values += found
            time.sleep(PAUSE_S)
            if cut < 0:
                return values
            at = cut + 1

    def _next(self, at: int, closing: str) -> tuple[int, bool]:
        """Where to go on after a value, and whether its container ended."""
        at = self._skip(at)
        mark = self._text[at : at + 1]
        if mark == closing:
            return at + 1, True
        if mark != ",":
            raise self._fault("Expecting ',' delimiter", at)
        return self._skip(at + 1), False

    def _count(self) -> None:
        """One more key, or one more entry of a list that is not all numbers."""
        self._entries += 1
        if self._entries > self._max_entries:
            where = f"{self._field[:100]}: " if self._field else ""
            raise InvalidRequest(
                f"{where}the body holds more than {self._max_entries} keys, texts, arrays and "
                "objects",
                param=self._field[:100] or None,
            )
        if not self._entries % ENTRIES_PER_STEP:
            time.sleep(PAUSE_S)

    def _skip(self, at: int) -> int:
        found = _space(self._text, at)
        assert found is not None
        return found.end()

    def _fault(self, message: str, at: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, at)
