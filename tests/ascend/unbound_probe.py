"""Runs in the stand-in environment: each row of the Ascend table with its binding left out. Prints
what the registry says, once as it is and once with the look at what is bound taken out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from config import determinism, settings


def main() -> None:
    determinism.apply(settings.load({"device": "npu"}), "npu")
    import torch
    import torch_npu  # noqa: F401

    from ops import registry
    from ops.backends import ascend

    torch.npu.set_device(0)  # type: ignore[attr-defined]
    rows = ascend.rows()
    unbound = [replace(row, install=lambda: None) for row in rows]
    blind = [replace(row, installed=lambda: True) for row in unbound]
    found = {"refused": said(registry, unbound), "looked away": said(registry, blind)}
    registry._installed.clear()
    registry.install(rows)
    found["bound"] = {row.op: row.installed() for row in rows}
    print(json.dumps(found))


def said(registry: Any, rows: Any) -> dict[str, str]:
    out = {}
    for row in rows:
        registry._installed.clear()
        try:
            registry.install([row])
            out[row.op] = "taken"
        except registry.NotInstalled as fault:
            out[row.op] = str(fault)
    return out


if __name__ == "__main__":
    main()
