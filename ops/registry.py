"""Override rows: which operation is ours, by which kernel, how it is bound and how its bits are
checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class OpsError(RuntimeError):
    """Base of every fault of the numerics. Any of them stops the start."""


class NotInstalled(OpsError):
    """An override that should be in force is not, or something else owns the op."""


class NotInvariant(OpsError):
    """A check found two results that should be equal bit for bit. The message names op, case and
    first element.
    """


@dataclass(frozen=True)
class Override:
    """One row. `op` is torch's or vLLM's own name ("aten::mm", "vllm.RMSNorm", "vllm.Sampler").

    `install` binds the kernel and raises on any fault; `installed` looks at what is really bound,
    not at a flag; `check` runs the op alone, in batches, at several positions and again, and raises
    `NotInvariant`. `tiles` are the numbers that fix the order of accumulation; with `kernel` they
    are part of the fingerprint.
    """

    op: str
    kernel: str
    reason: str
    install: Callable[[], None]
    installed: Callable[[], bool]
    check: Callable[[], None]
    tiles: Mapping[str, Any] = field(default_factory=dict)


_installed: dict[str, Override] = {}


def install(rows: Iterable[Override]) -> None:
    """Bind every row, once. Raises `NotInstalled` on a doubly registered op or one that did not
    bind.
    """
    for row in rows:
        held = _installed.get(row.op)
        if held is row:
            continue
        if held is not None:
            raise NotInstalled(f"{row.op}: two owners, {held.kernel} and {row.kernel}")
        row.install()
        if not row.installed():
            raise NotInstalled(f"{row.op}: {row.kernel} was installed but is not what runs")
        _installed[row.op] = row


def rows() -> tuple[Override, ...]:
    """What is in force in this process, by op name."""
    return tuple(_installed[op] for op in sorted(_installed))


def table() -> list[dict[str, Any]]:
    """The table that the fingerprint takes in: op, kernel, tiles. Sorted, JSON-ready."""
    return [
        {"op": r.op, "kernel": r.kernel, "tiles": dict(sorted(r.tiles.items()))} for r in rows()
    ]


def table_hash() -> str:
    """SHA-256 of the canonical JSON of `table()`; equal on every rank or the start stops."""
    text = json.dumps(table(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def report(run_checks: bool = True) -> dict[str, Any]:
    """One process' answer to `check_ops`: {table, hash, checks: {op: "ok" | message}}."""
    checks: dict[str, str] = {}
    for row in rows():
        if not row.installed():
            checks[row.op] = f"{row.kernel} is no longer bound"
            continue
        if not run_checks:
            checks[row.op] = "not run"
            continue
        try:
            row.check()
            checks[row.op] = "ok"
        except OpsError as fault:
            checks[row.op] = str(fault)
    return {"table": table(), "hash": table_hash(), "checks": checks}
