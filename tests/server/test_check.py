"""`samebits check` without an engine: the summary, and what the NPU's run is told."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import check, check_report, cli, engine_probe
from tests.server.fake import FakeEngine

GOOD = {"case": "first 2 rows", "ok": True, "message": ""}
BAD = {"case": "first 3 rows", "ok": False, "message": "aten::mm: first 3 rows: 1 of <9> differ"}


def test_summary_names_the_first_case_that_differs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "r"
    assert check.summary([{"aten::mm": [GOOD, GOOD]}, {}], out, out) == 0
    assert "rank 0  aten::mm: 2 cases equal" in capsys.readouterr().out
    ranks = [{"aten::mm": [GOOD]}, {"aten::mm": [GOOD, BAD]}]
    assert check.summary([*ranks, {"greedy": [GOOD]}], out, out) == 3
    said = capsys.readouterr().out
    assert "rank 1  aten::mm: aten::mm: first 3 rows" in said
    assert "engine  greedy: 1 cases equal" in said and "NOT EQUAL" in said


@pytest.mark.parametrize("cases", [[GOOD, GOOD], [GOOD, BAD]])
def test_the_report_and_its_picture(tmp_path: Path, cases: list[dict[str, Any]]) -> None:
    found = check_report.report(
        device="cpu", fingerprint="sb_1", seconds=1.5, ranks=[{"aten::mm": cases}],
        engine={"greedy, 3 tokens": [GOOD | {"case": "in a batch of 2"}]},
    )  # fmt: skip
    page = check_report.write(tmp_path / "r.json", found, lambda case: case).read_text()
    assert json.loads((tmp_path / "r.json").read_text()) == found
    held = BAD not in cases
    assert found["held"] is held
    assert page.count('class="no"') == (0 if held else 1) and 'class="yes"' in page
    assert ("1 of &lt;9&gt; differ" in page) is not held
    assert "in a batch of 2" in page and "http" not in page


async def test_the_probe_through_the_engine_holds_and_sees_a_neighbour() -> None:
    await engine_probe.short(FakeEngine())
    held = await engine_probe.long(FakeEngine())
    assert len(held) == 9 and all(case["ok"] for cases in held.values() for case in cases)
    with pytest.raises(engine_probe.Differs, match=r"in a batch of 4: token \d"):
        await engine_probe.short(Neighbourly())
    seen = await engine_probe.long(Neighbourly())
    assert not seen.pop("a crowd")[0]["ok"]
    for cases in seen.values():
        assert {case["case"] for case in cases if case["ok"]} == {"again"}


async def test_the_crowd_holds_and_sees_what_only_many_show() -> None:
    engine = FakeEngine(delay_s=0.002)
    await engine_probe.crowd(engine)
    assert not engine.running
    with pytest.raises(engine_probe.Differs, match=r"in a crowd: question \d+: token \d"):
        await engine_probe.crowd(Crowded(delay_s=0.002))
    await engine_probe.short(Crowded(delay_s=0.002))  # a batch of four is too small to show it


@dataclass
class Neighbourly(FakeEngine):
    """Its logprobs depend on how many are asked at once."""

    def _value(self, rank: int) -> float:
        return -float(rank + len(self.running))


@dataclass
class Crowded(FakeEngine):
    """Its logprobs are others when more than five are asked at once."""

    def _value(self, rank: int) -> float:
        return -float(rank + (len(self.running) > 5))


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
