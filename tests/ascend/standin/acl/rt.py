"""See `acl`."""

from __future__ import annotations

from typing import Any


def memcpy(*_: Any) -> int:
    raise RuntimeError("the stand-in acl copies nothing")
