"""Tensor-parallel 2 through the real engine on the CPU: the sum over ranks keeps the promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import clean_env
from tests.engine.test_invariance import different

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def answers(folder: Path, mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tp_engine", str(folder), mode],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_bits_do_not_depend_on_what_travels_together(tmp_path: Path) -> None:
    found = answers(tmp_path, "ours")
    want = found["whole"]["runs"]["alone"]
    assert len(set(want)) == len(want)
    for engine in found.values():
        assert engine["faults"] == [{}, {}]
        assert engine["hashes"][0] == engine["hashes"][1]
        assert (
            engine["order"]
            == [
                [
                    "ops.collectives._communicator_all_reduce",
                    "ops.collectives._communicator_reduce_scatter",
                ]
            ]
            * 2
        )
        for how, digests in engine["runs"].items():
            assert digests == want, how


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_matrix_again_on_two_ranks(tmp_path: Path) -> None:
    """Rows, order, arrival, neighbours, chunks, blocks, preemption and prefix hits, each counted
    where that says that it happened."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.matrix_tp", str(tmp_path), "bfloat16", "quick"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    assert different(found) == {}
    assert {name.partition(":")[0] for name in found["checks"]} == {"rank 0", "rank 1"}
    assert set(found["checks"].values()) == {"ok"}
    counted = found["counted"]
    assert all(counted[f"{n} rows"] == n for n in (16, 17, 33, 65, 257))
    assert counted["preempted"] > 0 and counted["prefix: hit"] > 0 and counted["prefix: part"] > 0


def test_a_sum_that_looks_at_the_size_is_caught(tmp_path: Path) -> None:
    found = answers(tmp_path, "planted")["whole"]
    assert all("rows" in said for said in found["planted"]), "the start's check"
    assert found["runs"]["among others"] != found["runs"]["alone"], "the matrix"
