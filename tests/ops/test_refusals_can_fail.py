"""The test of every refusal fails when the refusal is taken out. Repeatable, and slow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_refusals_test_fails_without_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.taken_out"], capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 200
    wrong = {
        name: one
        for name, one in found.items()
        if (one["whole"], one["taken out"]) != ("passes", "fails")
    }
    assert wrong == {}
