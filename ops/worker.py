"""What the server asks of every rank, through vLLM's worker extension
(`worker_extension_cls="ops.worker.CheckExtension"`).
"""

from __future__ import annotations

import gc
from typing import Any


class CheckExtension:
    """Mixed into vLLM's worker class; methods are called by `collective_rpc` by name."""

    def check_ops(self, run_checks: bool = True) -> dict[str, Any]:
        """This rank's answer: {rank, mode, table, hash, checks: {op: "ok" | fault}, kernels,
        forward, elapsed_s}.

        `checks` holds one entry per installed op and one, "forward", for the recorded forward pass
        of the model. Any value other than "ok" must stop the start. Never raises on a failed check,
        so that every rank answers.
        """
        from ops import selfcheck

        report = selfcheck.rank_report(self, run_checks)
        if gc.isenabled():  # not in a server that starts the engine in its own process
            gc.collect()
            gc.freeze()  # what the checks have loaded stays: full collections need not walk it
        return report

    def check_ops_long(self, op: str | None = None) -> dict[str, Any]:
        """The long version behind `samebits check`, of all ops or of one: {op: [{case, ok,
        message}]} for this rank.
        """
        from ops import selfcheck

        return selfcheck.long_report(only=op)
