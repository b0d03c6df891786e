"""The Ascend ops in Triton's interpreter, against torch and against themselves on fewer rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")


def cases(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.ascend_cases", *words],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return cases()


@pytest.mark.parametrize("what", ["close", "rows", "slabs"])
def test_every_op(found: dict[str, Any], what: str) -> None:
    assert found[what] == found["names"]


def test_routing_depends_on_the_row_alone(found: dict[str, Any]) -> None:
    assert found["route"] == ["True", "True", "True"]


def test_a_block_chosen_by_rows_is_caught() -> None:
    assert "sum" not in cases("planted")["rows"]
