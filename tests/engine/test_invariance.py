"""The promise on the real engine: the same probes under everything that must not show in their
bits.

`tests.engine.matrix` runs one process with many engines; here its digests of token ids, logprobs
and logits are compared, and stock ops and planted ones are seen to fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import clean_env
from tests.engine.small_models import MODELS

pytestmark = pytest.mark.engine
NOT_CHECKS = {"alone", "counted", "checks"}


def run(
    folder: Path, mode: str, dtype: str, size: str = "quick", model: str = "llama"
) -> dict[str, Any]:
    """The matrix of one mode: {check: {probe: digest}}."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.matrix", mode, str(folder), dtype, size, model],
        env=clean_env(), capture_output=True, text=True, timeout=3000, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def different(found: dict[str, Any]) -> dict[str, list[str]]:
    """The probes of each check whose digest isn't the one they have alone."""
    alone = found["alone"]
    assert len(alone) >= 9
    return {
        check: bad
        for check, probes in found.items()
        if check not in NOT_CHECKS
        and (bad := [p for p, d in probes.items() if p in alone and d != alone[p]])
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_the_same_under_everything(folder: Path, dtype: str) -> None:
    found = run(folder, "ours", dtype)
    assert different(found) == {}
    assert set(found["checks"].values()) == {"ok"}
    counted = found["counted"]
    assert all(counted[f"{n} rows"] == n for n in (16, 17, 33, 65, 257))
    assert counted["preempted"] > 0 and counted["prefix: hit"] > 0 and counted["prefix: part"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_whole_matrix(folder: Path, dtype: str) -> None:
    assert different(run(folder, "ours", dtype, "full")) == {}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama"])
def test_every_architecture(folder: Path, model: str, dtype: str) -> None:
    found = run(folder, "ours", dtype, model=model)
    assert different(found) == {}
    assert set(found["checks"].values()) == {"ok"}
    assert found["counted"]["preempted"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["stock", "planted"])
def test_stock_and_planted_ops_are_seen_to_fail(folder: Path, mode: str) -> None:
    bad = different(run(folder, mode, "float32"))
    assert {"together", "chunks of 16"} & set(bad)
    assert any(check.endswith(" rows") for check in bad)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_check_can_fail(folder: Path) -> None:
    """With an op that is never the same twice, not one check holds."""
    found = run(folder, "drifting", "float32", "full")
    assert set(different(found)) == set(found) - NOT_CHECKS
