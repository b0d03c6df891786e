"""The acceptance run itself, on two stand-in NPUs: every step that they allow runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.ascend.conftest import ROOT, variables


def report(npu: Path, out: Path, *words: str, **env: Any) -> tuple[int, dict[str, Any]]:
    env = {"STANDIN_NPUS": "2", "OMP_NUM_THREADS": "1", **env}
    command = [npu, "-m", "server", "check", "--device", "npu", "--dtype", "float16"]
    command += ["--quick", "--out", out]
    done = subprocess.run(
        [*map(str, command), *words],
        env=variables(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    steps = json.loads(out.read_text())["steps"]
    return done.returncode, {step["step"]: step for step in steps}


def test_every_step(npu: Path, models: dict[str, Path], tmp_path: Path) -> None:
    model = str(models["dense"])
    options = ["--models", model, "--tp", "1", "2", "4", "--max-model-len", "128"]
    code, steps = report(npu, tmp_path / "report.json", *options)
    assert code == 0, steps
    assert {name: step["verdict"] for name, step in steps.items()} == {
        "machine": "held",
        "library, variables and versions": "held",
        "ops": "held",
        "all-reduce on 2": "held",
        "all-reduce on 4": "not run",
        f"{model} on 1": "held",
        f"{model} on 2": "held",
        f"{model} on 4": "not run",
    }
    assert steps["ops"]["compared"] >= 35
    for size in (1, 2):
        assert all(steps[f"{model} on {size}"]["equal"].values())
    for rank in steps["all-reduce on 2"]["ranks"]:
        assert rank["hccl_deterministic"] == 2 and all(rank["ours"].values())


def test_what_is_missing_or_wrong_is_in_the_report(npu: Path, tmp_path: Path) -> None:
    code, steps = report(npu, tmp_path / "missing.json", library=False)
    assert code == 3
    found = steps["library, variables and versions"]
    assert found["verdict"] == "failed" and "HAS_ASCENDC_BATCH_INVARIANT" in found["message"]
    code, steps = report(npu, tmp_path / "fault.json", STANDIN_FAULT="split")
    assert code == 3 and steps["ops"]["verdict"] == "failed"
    assert "aten::mm" in steps["ops"]["wrong"]


def test_a_link_that_loses_a_bit_fails_the_collectives_and_no_other_step(
    npu: Path, tmp_path: Path
) -> None:
    options = ["--tp", "2"]
    code, steps = report(npu, tmp_path / "link.json", *options, STANDIN_FAULT="link")
    assert code == 3
    failed = [name for name, step in steps.items() if step["verdict"] == "failed"]
    assert failed == ["all-reduce on 2"]
    assert not all(steps["all-reduce on 2"]["ranks"][1]["ours"].values())
