"""The demo model is made once, whoever starts, and whoever is killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server import demo_model
from tests.engine.conftest import clean_env
from tests.server.live import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
ENSURE = "from server import demo_model; print(demo_model.ensure(print))"


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENSURE], env=clean_env(SAMEBITS_CACHE_DIR=str(cache)),
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_starts_after_one_that_was_killed(tmp_path: Path) -> None:
    """The killed one leaves its converter at work; of the two, one converts and one waits."""
    want = files(demo_model.ensure(print))
    killed = start(tmp_path)
    parts = tmp_path / "models"
    assert until(lambda: any(parts.glob("*.part*")), 120)
    killed.kill()
    killed.communicate()
    two = [start(tmp_path), start(tmp_path)]
    said = [one.communicate(timeout=200) for one in two]
    assert [one.returncode for one in two] == [0, 0], said
    assert sum("Converting" in err for _, err in said) == 1
    assert files(parts / demo_model.FOLDER) == want
