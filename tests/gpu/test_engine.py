"""A whole engine on a GPU, compiled, with graphs: the same requests in every company, after a
restart with other settings, and stock vLLM seen to fail. Skipped, with the reason, without one.

The same commands that docs/gpu.md was measured with (tests.bench.gpu_engine).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.timeout(900),
]


def report(folder: Path, shape: str, mode: str, *options: str) -> dict[str, Any]:
    """What an engine of its own process found: its checks, and its bits."""
    out = folder / f"{shape}-{mode}-{len(options)}.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu_engine", shape, mode, str(out), *options],
        input="start\ncheck\nbits\nquit\n", capture_output=True, text=True, timeout=850,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    faults = [answer for answer in found.get("answers", []) if "fault" in answer]
    assert found and not faults, (faults, done.stderr[-3000:])
    return found


def broken(found: dict[str, Any]) -> list[str]:
    """The rows whose probes did not all equal "alone", or whose repetitions differed."""
    rows = {k: v for k, v in found["bits"].items() if k != "preemptions"}
    assert len(rows) == 18
    return [k for k, v in rows.items() if v != (1 if "outcomes" in k else "8/8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    return report(folder, "1.7b", "ours")


def test_bits_in_every_company(ours: dict[str, Any]) -> None:
    assert broken(ours) == []
    assert set(ours["checks"]["checks"].values()) == {"ok"}


def test_restart_with_other_chunks_and_preemption(folder: Path, ours: dict[str, Any]) -> None:
    again = report(
        folder, "1.7b", "ours", "--kv", "2", "--blocks", "1100", "--batched", "1024"
    )  # fmt: skip
    assert broken(again) == []
    assert again["bits"]["preemptions"] > 0
    assert again["alone"] == ours["alone"]


def test_bits_of_experts(folder: Path) -> None:
    assert broken(report(folder, "30b-a3b-16", "ours", "--kv", "3")) == []


def test_stock_is_seen_to_fail(folder: Path) -> None:
    found = broken(report(folder, "1.7b", "stock"))
    assert {"T=0.0 batch 8", "T=1.0 batch 8"} <= set(found)
