"""One byte string for one value: what fingerprints and receipts are hashed over.

Canonical JSON: UTF-8, object keys sorted by code point, no white space, the shortest escapes
(`\\"`, `\\\\`, `\\n`, `\\r`, `\\t`, `\\b`, `\\f`, other control characters as `\\u00xx`), integers
in decimal at any size. A float is never written as a number, because languages print them
differently: it is the string "f64:" and the 16 hexadecimal digits of its IEEE-754 binary64 bits,
most significant first.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any


def encode(value: Any) -> bytes:
    """The canonical bytes of a JSON value. Raises `TypeError` on anything else, `ValueError` on
    NaN and infinities.
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def sha256_of(value: Any) -> str:
    """SHA-256 of the canonical bytes, 64 hexadecimal digits."""
    return hashlib.sha256(encode(value)).hexdigest()


def float_bits(value: float) -> str:
    """ "f64:" and 16 hexadecimal digits."""
    if not math.isfinite(value):
        raise ValueError(f"{value}: not a finite number")
    return "f64:" + struct.pack(">d", value).hex()


def sha256_of_ids(token_ids: Sequence[int]) -> str:
    """SHA-256 of the ids as unsigned 32-bit big-endian integers, one after the other."""
    return hashlib.sha256(struct.pack(f">{len(token_ids)}I", *token_ids)).hexdigest()


def sha256_of_floats(values: Sequence[float]) -> str:
    """SHA-256 of the values as binary64, big-endian, one after the other: every bit counts, also
    of NaN and -0.
    """
    return hashlib.sha256(struct.pack(f">{len(values)}d", *values)).hexdigest()


def sha256_of_text(text: str) -> str:
    """SHA-256 of the UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float_bits(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("object keys must be strings")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__}: not a JSON value")
