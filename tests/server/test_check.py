"""`samebits check` without an engine: the summary, and what the NPU's run is told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import check, cli


def test_summary_names_the_first_case_that_differs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = {"case": "first 2 rows", "ok": True, "message": ""}
    bad = {"case": "first 3 rows", "ok": False, "message": "aten::mm: first 3 rows: 1 of 9 differ"}
    assert check.summary([{"aten::mm": [good, good]}], tmp_path / "r") == 0
    assert "2 cases equal" in capsys.readouterr().out
    assert check.summary([{"aten::mm": [good]}, {"aten::mm": [good, bad]}], tmp_path / "r") == 3
    assert "rank 1  aten::mm: aten::mm: first 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 3])
def test_on_an_npu_the_acceptance_run_is_started(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        started.append(command)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    words = "check --device npu --models a b --tp 1 8 --dtype float16 --out report.json".split()
    assert cli.main(words) == code
    (command,) = started
    assert command[1:3] == ["-m", "ops.hardware_check"]
    told = " ".join(command[3:])
    assert told == "--out report.json --model a --model b --tp 1 8 --dtype float16"


def test_a_wrong_setting_is_a_line_and_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--max-num-seqs", "none"]) == 2
    assert "SAMEBITS_MAX_NUM_SEQS" in capsys.readouterr().err
