"""Ids: those the server makes, and which ones of a client's are repeated to it."""

from __future__ import annotations

import re
import secrets

_SHOWABLE = re.compile(rb"[\x21-\x7e]{1,128}")


def new_id(prefix: str) -> str:
    """A fresh id from the system's randomness: unique whatever seeds the process has set."""
    return f"{prefix}-{secrets.token_hex(16)}"


def request_id(given: bytes | None) -> str:
    """The client's `X-Request-Id` when it is printable ASCII of at most 128; otherwise a fresh one.

    It is for logs and headers only; the engine never sees it.
    """
    if given is not None and _SHOWABLE.fullmatch(given):
        return given.decode("ascii")
    return new_id("req")
