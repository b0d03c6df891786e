"""Triton kernels against plain PyTorch, and their bits across batches, in Triton's interpreter.

The interpreter multiplies with numpy, so it proves indexing, masks, segments and joins, not the
chip's order of accumulation: tests/gpu does that. Inputs of products are small multiples of powers
of two there where bits are compared, so that every order of a correct sum gives the same bits, and
a wrong row, key or segment cannot.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CASES = ["linear", "bmm", "moe", "norm", "softmax", "reduce", "attention", "sort", "rank"]


@pytest.mark.parametrize("case", CASES)
def test_kernel_in_the_interpreter(case: str) -> None:
    """A process of its own: the interpreter must be chosen before triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"import tests.ops.triton_cases as c; c.run({case!r})"],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checks = json.loads(done.stdout.splitlines()[-1])
    assert checks["held"] >= 4, checks
    assert checks["planted_fault_seen"], checks
