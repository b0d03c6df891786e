"""JSON in and out, strictly: what comes in is exactly JSON, what goes out is too.

In: UTF-8, no duplicate keys, no NaN or Infinity, no number that overflows to one, no lone
surrogate, bounded nesting. Out: compact, never NaN; a lone surrogate in a text (which UTF-8 can't
carry) leaves as its `\\ud83d` escape.
"""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

from server.errors import InvalidRequest
from server.stepwise import PAUSE_S, Reader

_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
)
_encode = _encoder.encode


# Only such numbers can overflow; without any, floats are read by the fast path of the parser.
_MAY_OVERFLOW = re.compile(r"[0-9][eE]\+?0*[0-9]{3}|[0-9]{300}")
LARGE_BYTES = 64 << 10  # a larger body is read in steps, in a thread beside the loop
ENTRIES_PER_SLICE = 8192
MAX_ENTRIES = 50_000  # keys, texts, arrays and objects in a large body


def dumps(value: Any) -> bytes:
    """Compact JSON. Raises ValueError on NaN or Infinity: those are caught where numbers are read
    from the engine.
    """
    return _encode(value).encode("utf-8", "backslashreplace")


def dumps_long(values: list[Any]) -> bytes:
    """A list like `dumps`. A long one takes pauses: not on the event loop."""
    parts = []
    for at in range(0, len(values), ENTRIES_PER_SLICE):
        if at:
            time.sleep(PAUSE_S)
        parts.append(dumps(values[at : at + ENTRIES_PER_SLICE])[1:-1])
    return b"[" + b",".join(parts) + b"]"


class _Hooks:
    """Hooks of one parse: what the standard parser lets through is noticed here."""

    def __init__(self) -> None:
        self.nonfinite = False
        hooks: Any = {"parse_constant": self.constant, "object_pairs_hook": self.pairs}
        self._fast = json.JSONDecoder(**hooks)
        self._checked = json.JSONDecoder(parse_float=self.number, **hooks)

    def decoder(self, text: str) -> json.JSONDecoder:
        """A parser for `text`, or for a piece of it."""
        may = len(text) > LARGE_BYTES or _MAY_OVERFLOW.search(text)
        return self._checked if may else self._fast

    def number(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self.nonfinite = True
        return value

    def constant(self, text: str) -> float:
        self.nonfinite = True
        return float(text.replace("Infinity", "inf"))

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"the key {twice[:100]!r} stands twice", param=twice[:100])
        return found


def loads(body: bytes, *, max_depth: int, max_entries: int = MAX_ENTRIES) -> dict[str, Any]:
    """A request body as a dict. Raises `InvalidRequest`, naming the field where there is one. A
    large one is read with pauses: not on the event loop.
    """
    hooks = _Hooks()
    try:
        text = body.decode("utf-8")
        if len(body) > LARGE_BYTES:
            value = Reader(
                text,
                decoder=hooks.decoder,
                pairs=hooks.pairs,
                max_depth=max_depth,
                max_entries=max_entries,
            ).read()
        else:
            value = hooks.decoder(text).decode(text)
            _check_depth(body, value, max_depth)
    except UnicodeDecodeError as fault:
        raise InvalidRequest(f"the body is not UTF-8 (byte {fault.start})") from None
    except json.JSONDecodeError as fault:
        where = f"line {fault.lineno} column {fault.colno}"
        raise InvalidRequest(f"the body is not JSON: {fault.msg} at {where}") from None
    except RecursionError:
        raise InvalidRequest(f"the body is nested deeper than {max_depth} levels") from None
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidRequest("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if hooks.nonfinite:
        path = _find(value, lambda leaf: isinstance(leaf, float) and not math.isfinite(leaf))
        raise InvalidRequest(f"{path}: not a finite number", param=path)
    if "\\ud" in text or "\\uD" in text:
        path = _find(value, _has_surrogate)
        if path:
            raise InvalidRequest(f"{path}: half of a surrogate pair is not text", param=path)
    return value


def _check_depth(body: bytes, value: Any, max_depth: int) -> None:
    """Raise when containers are nested deeper than allowed. Bodies with few brackets can't be, and
    are not walked.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    level, depth = [value], 1
    while level:
        if depth > max_depth:
            raise InvalidRequest(f"the body is nested deeper than {max_depth} levels")
        below: list[Any] = []
        for node in level:
            leaves = node.values() if isinstance(node, dict) else node
            below += [leaf for leaf in leaves if isinstance(leaf, dict | list)]
        level, depth = below, depth + 1


def _has_surrogate(leaf: Any) -> bool:
    return isinstance(leaf, str) and any("\ud800" <= c <= "\udfff" for c in leaf)


def _find(value: Any, wanted: Any, path: str = "") -> str:
    """The path of the first leaf or key that `wanted` accepts: "stop[1]", "metadata.a"; "" when
    there is none.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            here = f"{path}.{key}" if path else str(key)
            if wanted(key):
                return path or "the body's keys"
            if found := _find(item, wanted, here):
                return found
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if found := _find(item, wanted, f"{path}[{index}]"):
                return found
    elif wanted(value):
        return path
    return ""
