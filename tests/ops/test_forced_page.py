"""docs/forced.md is what the table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from config import determinism

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "forced.py"


def script() -> object:
    spec = importlib.util.spec_from_file_location("forced_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_current() -> None:
    made = script().page()  # type: ignore[attr-defined]
    assert SCRIPT.with_name("forced.md").read_text(encoding="utf-8") == made, (
        "run: python docs/forced.py"
    )


def test_every_row_is_on_the_page() -> None:
    made = script().page()  # type: ignore[attr-defined]
    for device in determinism.ALL:
        for row in determinism.table(device):
            assert row.name in made


def test_a_changed_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "CPU", determinism.CPU[:-1])
    made = script().page()  # type: ignore[attr-defined]
    assert SCRIPT.with_name("forced.md").read_text(encoding="utf-8") != made
