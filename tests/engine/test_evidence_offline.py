"""The two roads to reproducibility on the same prompts: what each promises, what not, and the
caller's random state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import clean_env
from tests.engine.test_evidence import ROOT, model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
__all__ = ["model"]


def walk(road: str, model: Path, folder: Path) -> dict:
    """The road's script in a process of its own."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "engine" / "two_roads.py", road, model],
        capture_output=True, text=True, cwd=folder, timeout=600,
        env=clean_env(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert "ROADS " in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("ROADS ", 1)[1].splitlines()[0])


@pytest.fixture(scope="module")
def scheduled(model, tmp_path_factory):
    """Stock vLLM in one process, twice."""
    return [walk("schedule", model, tmp_path_factory.mktemp("road")) for _ in range(2)]


@pytest.fixture(scope="module")
def invariant(model, tmp_path_factory):
    """Our ops, once."""
    return walk("invariant", model, tmp_path_factory.mktemp("road"))


def test_deterministic_scheduling_repeats_a_script(scheduled):
    first, second = scheduled
    assert first["together"] == second["together"] and first["alone"] == second["alone"]


def test_deterministic_scheduling_is_not_batch_invariance(scheduled):
    assert scheduled[0]["alone"] != scheduled[0]["together"]


def test_deterministic_scheduling_takes_the_callers_random_state(scheduled):
    first, second = scheduled
    assert not first["untouched"] and first["drawn"] == second["drawn"]


def test_batch_invariance_holds_alone_and_together(invariant):
    assert invariant["alone"] == invariant["together"]


def test_batch_invariance_leaves_the_callers_random_state(invariant):
    assert invariant["untouched"]
