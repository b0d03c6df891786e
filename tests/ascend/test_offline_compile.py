"""Every Triton kernel that Ascend needs, compiled for three chips without one. Compiled, not
run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.conftest import HERE
from tests.ascend.offline import TARGETS


@pytest.fixture(scope="module")
def compiled(tri: Path) -> dict[str, Any]:
    done = subprocess.run(
        [tri, HERE / "offline.py"], capture_output=True, text=True, timeout=500, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return found


@pytest.mark.parametrize("chip", TARGETS)
def test_kernels_fit_in_one_chain_without_atomics(compiled: dict[str, Any], chip: str) -> None:
    real = {name: case for name, case in compiled.items() if not name.startswith("planted")}
    assert len(real) >= 22
    for name, case in real.items():
        found = case[chip]
        assert found["fits"], f"{name}: {found['message']}"
        assert found["atomics"] == 0, name
        assert found["dots"] == case["wanted_dots"], f"{name}: more than one loop adds along K"
        assert found["mma"] == case["wanted_dots"], f"{name}: the compiler split the product"
        assert found["specialised"] == [], f"{name}: compiled anew for one row"


@pytest.mark.parametrize("chip", TARGETS)
def test_planted_faults_are_seen(compiled: dict[str, Any], chip: str) -> None:
    assert "cc overflow" in compiled["planted: too wide a tile"][chip]["message"]
    assert "ub overflow" in compiled["planted: a row too long"][chip]["message"]
    split = compiled["planted: split K with atomics"][chip]
    assert split["atomics"] > 0 and split["specialised"] == ["M"]
