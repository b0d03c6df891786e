"""The Ascend bindings on an `npu` device made in Python: right overloads, right key, one owner."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HITS = {
    "x @ w": "matmul",
    "mm": "mm",
    "F.linear": "linear",
    "F.linear with bias": "linear",
    "F.linear of 3 dimensions": "linear",
    "addmm": "addmm",
    "bmm": "bmm",
    "softmax": "softmax.int",
    "F.softmax to fp32": "softmax.int",
    "log_softmax": "log_softmax.int",
    "Tensor.sum(dim)": "sum.dim_IntList",
    "torch.sum(dim)": "sum.dim_IntList",
    "sum": "sum",
    "Tensor.mean(dim)": "mean.dim",
    "mean": "mean",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.npu_device"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


@pytest.mark.parametrize("what", HITS)
def test_a_call_reaches_our_kernel(found: dict[str, Any], what: str) -> None:
    assert HITS[what] in found["hits"][what]


def test_integers_keep_torchs_kernel(found: dict[str, Any]) -> None:
    assert found["hits"]["sum of integers"] == []


def test_all_are_bound(found: dict[str, Any]) -> None:
    assert found["bound"] and all(found["bound"].values())


def test_the_overload_that_vllm_ascend_binds_is_called_by_nobody(found: dict[str, Any]) -> None:
    assert found["an overload that nothing calls"] == 0


def test_a_second_owner_is_refused(found: dict[str, Any]) -> None:
    assert "aten::mm: already has an owner" in found["second owner"]
    assert "Remedy" in found["second owner"]


def test_who_overrides_us_later_is_seen(found: dict[str, Any]) -> None:
    assert found["after a third party"] is False
