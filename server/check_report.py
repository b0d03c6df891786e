"""What `samebits check` found, as JSON and as one HTML page with the matrix as a picture."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = "samebits.check/1"
Cases = Sequence[Mapping[str, Any]]
CELL, LABEL = 15, 250


def report(
    *,
    device: str,
    fingerprint: str,
    seconds: float,
    ranks: Sequence[Mapping[str, Cases]],
    engine: Mapping[str, Cases],
) -> dict[str, Any]:
    """The JSON report. `ranks`: per rank, cases by op; `engine`: cases by probe, asked end to
    end.
    """
    return {
        "schema": SCHEMA,
        "device": device,
        "fingerprint": fingerprint,
        "seconds": seconds,
        "held": all(
            case["ok"] for by in (*ranks, engine) for cases in by.values() for case in cases
        ),
        "ranks": [dict(by) for by in ranks],
        "engine": dict(engine),
    }


def write(path: Path, found: Mapping[str, Any], condition: Callable[[str], str]) -> Path:
    """`path` (JSON) and beside it the same name with .html, which is returned. `condition`: the
    column of an op's case.
    """
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    beside = path.with_suffix(".html")
    beside.write_text(page(found, condition), encoding="utf-8")
    return beside


def page(found: Mapping[str, Any], condition: Callable[[str], str]) -> str:
    """One self-contained page: the verdict, a picture per rank and one of the engine, what
    differs.
    """
    pictures = ""
    for rank, by in enumerate(found["ranks"]):
        pictures += f"<h2>Ops on rank {rank}, each alone</h2>" + picture(_grid(by, condition))
    if found["engine"]:
        pictures += "<h2>Through the engine</h2>" + picture(_grid(found["engine"], str))
    wrong = [
        (name, case)
        for by in (*found["ranks"], found["engine"])
        for name, cases in by.items()
        for case in cases
        if not case["ok"]
    ]
    listed = "".join(
        f"<li><b>{html.escape(name)}</b> {html.escape(case['message'])}</li>"
        for name, case in wrong[:200]
    )
    return _PAGE.format(
        verdict="Every case is equal, bit for bit." if found["held"] else "Not equal.",
        css="good" if found["held"] else "bad",
        server=html.escape(f"{found['device']} · {found['fingerprint']} · {found['seconds']} s"),
        pictures=pictures,
        wrong=f"<h2>What differs</h2><ul>{listed}</ul>" if wrong else "",
    )


Grid = dict[str, dict[str, tuple[int, int]]]


def _grid(by: Mapping[str, Cases], column: Callable[[str], str]) -> Grid:
    """{row: {column: (cases, of which differ)}}."""
    grid: Grid = {}
    for name, cases in by.items():
        row = grid.setdefault(name, {})
        for case in cases:
            at = column(case["case"])
            count, wrong = row.get(at, (0, 0))
            row[at] = (count + 1, wrong + (not case["ok"]))
    return grid


def picture(grid: Grid) -> str:
    """Rows by conditions: one cell each; its colour says equal or not, its title how many."""
    columns = list(dict.fromkeys(at for row in grid.values() for at in row))
    columns.sort(key=lambda at: [int(n) for n in re.findall(r"\d+", at)])
    width, top = LABEL + CELL * 2 * len(columns) + 120, 110
    cells = "".join(
        f'<text transform="translate({LABEL + CELL * (2 * i + 1)},{top - 8}) rotate(-40)">'
        f"{html.escape(at)}</text>"
        for i, at in enumerate(columns)
    )
    for j, (name, row) in enumerate(grid.items()):
        y = top + j * (CELL + 3)
        cells += f'<text x="{LABEL - 8}" y="{y + 11}" text-anchor="end">{html.escape(name)}</text>'
        for i, at in enumerate(columns):
            if at in row:
                count, wrong = row[at]
                words = html.escape(f"{name}, {at}: {count} cases, {wrong} differ")
                cells += (
                    f'<rect class="{"no" if wrong else "yes"}" x="{LABEL + CELL * 2 * i}" y="{y}" '
                    f'width="{CELL * 2 - 3}" height="{CELL}"><title>{words}</title></rect>'
                )
    height = top + len(grid) * (CELL + 3) + 4
    return (
        f'<div class=w><svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="rows by conditions">{cells}</svg></div>'
    )


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Samebits check</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>
:root{{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--soft:#667;--bad:#c0392b;--good:#1e8449}}
@media(prefers-color-scheme:dark){{:root{{--fg:#e6e8eb;--bg:#14171a;--soft:#9aa4b0;--bad:#ff7b6b;
--good:#3fae72}}}} body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;
padding:0 1rem;color:var(--fg);background:var(--bg)}}h1{{font-size:1.4rem}}
h1.good{{color:var(--good)}}h1.bad{{color:var(--bad)}}h2{{font-size:1.05rem;margin-top:2rem}}p{{color:var(--soft)}}
.w{{overflow-x:auto}}svg{{font:12px system-ui,sans-serif;fill:var(--fg)}}.yes{{fill:var(--good)}}
.no{{fill:var(--bad)}}li{{overflow-wrap:anywhere}}</style><h1 class="{css}">{verdict}</h1>
<p>{server}</p>{pictures}{wrong}</html>
"""
