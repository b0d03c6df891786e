"""`samebits serve` with vLLM's own sampler put back: the fault that the draw's properties must see.

    python -m tests.engine.stock_sampler [--no-probe] serve …

Seeds go to vLLM as its own front end would give them. `--no-probe`: without the probe through the
engine, which refuses such a start.
"""

from __future__ import annotations

import sys
from typing import Any

from ops.backends import cpu
from server import cli, engine_probe, vllm_engine, vllm_output


def plant(*, probe: bool) -> None:
    """Leave our row of the sampler out, and hand seeds to vLLM."""
    rows, made = cpu.rows, vllm_output.sampling_params

    def sampling_params(sampling: Any, *, whole: bool = False, **_: Any) -> Any:
        return made(sampling, whole=whole, plain=True)

    async def passed(_: Any) -> None:
        return None

    cpu.rows = lambda: [row for row in rows() if row.op != "vllm.Sampler"]  # type: ignore
    vllm_engine.sampling_params = sampling_params
    if not probe:
        engine_probe.short = passed


if __name__ == "__main__":
    words = sys.argv[1:]
    plant(probe="--no-probe" not in words)
    sys.exit(cli.main([word for word in words if word != "--no-probe"]))
