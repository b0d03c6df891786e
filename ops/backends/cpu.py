"""The CPU's table: every op that is ours there. A table only; kernels are chosen by
`ops.kernels.cpu.load`.
"""

from __future__ import annotations

from ops.registry import Override


def rows() -> list[Override]:
    """All override rows of the CPU, in the order in which they are installed."""
    from ops.bindings import activations, aten, attention, decoder, linear, moe, norms, rotary
    from ops.collectives import CPU_ROWS
    from ops.sampling_hook import OVERRIDE

    found: list[Override] = []
    for module in (aten, linear, norms, activations, rotary, attention, moe, decoder):
        found += module.rows()
    return [*found, OVERRIDE, *CPU_ROWS]


def kernels() -> tuple[str, str]:
    """(name, reason) of the kernels in force, for the log and the report."""
    from ops.kernels.cpu import load

    loaded = load()
    return loaded.name, loaded.reason
