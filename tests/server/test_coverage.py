"""The coverage map and the code agree: named tests exist, refusals are in the code, no condition
is left out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from server.examination import PROVEN

ROOT = Path(__file__).parents[2]
COLUMNS = ("CPU", "CUDA", "Ascend")
# What the promise is about. Each must have its row.
CONDITIONS = (
    "batch", "order", "prefix cache", "chunked", "preemption", "restart", "tensor parallel",
    "graphs", "LoRA", "quantization", "speculative decoding", "mixture of experts",
    "several nodes", "another device",
)  # fmt: skip


def rows():
    found = {}
    for line in (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "condition":
            found[cells[0]] = dict(zip(COLUMNS, cells[1:], strict=True))
    return found


def faults_of(cell, sources):
    """What is wrong with a cell; empty when nothing is."""
    kind, _, rest = cell.partition(": ")
    if kind == "proven":
        names = re.findall(r"`([^`]+)`", rest)
        return ["names no test"] * (not names) + [f"no {n}" for n in names if not exists(n)]
    if kind == "refused":
        message = re.search(r'"(.+)"', rest)
        return [] if message and message[1] in sources else ["no such message in the code"]
    if kind == "not covered":
        return [] if rest.strip() else ["does not say why"]
    return [f"starts with {kind!r}"]


def exists(name):
    path, *inner = name.split("::")
    file = ROOT / path
    if not file.is_file() or not inner:
        return False
    scope = ast.parse(file.read_text(encoding="utf-8")).body
    for part in inner:
        nodes = [n for n in scope if getattr(n, "name", None) == part]
        if not nodes:
            return False
        scope = getattr(nodes[0], "body", [])
    return inner[-1].startswith("test_")


@pytest.fixture(scope="module")
def sources():
    """The code's text, with string literals that are split over lines joined as Python joins
    them.
    """
    files = [f for folder in ("config", "server", "ops") for f in (ROOT / folder).rglob("*.py")]
    texts = [f.read_text(encoding="utf-8") for f in files]
    joined = [
        node.value
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(joined)


def test_every_cell_is_true(sources):
    faults = {
        f"{condition}, {column}": wrong
        for condition, cells in rows().items()
        for column, cell in cells.items()
        if (wrong := faults_of(cell, sources))
    }
    assert not faults


def test_no_condition_is_left_out():
    names = " / ".join(rows())
    assert [c for c in CONDITIONS if c not in names] == []


@pytest.mark.parametrize(
    "cell",
    [
        "proven: `tests/server/test_coverage.py::test_that_is_not_there`",
        "proven: `tests/absent.py::test_x`",
        "proven: `tests/server/test_coverage.py`",
        "proven: surely",
        'refused: "no message of ours says this"',
        "refused: somehow",
        "not covered: ",
        "perhaps: later",
    ],
)
def test_a_false_cell_is_found(cell, sources):
    assert faults_of(cell, sources)


def test_the_doctor_calls_proven_what_the_tests_make():
    models = ROOT / "tests" / "engine" / "small_models.py"
    if not models.is_file():
        pytest.skip("no tests/engine/small_models.py here: nothing to hold the list to")
    made = models.read_text(encoding="utf-8")
    assert set(re.findall(r'"(\w+(?:ForCausalLM|LMHeadModel))"', made)) == PROVEN
