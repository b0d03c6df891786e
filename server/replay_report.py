"""What a replay found: counts in flat memory, a JSON report, and one HTML page with one picture."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "samebits.replay/1"
KEPT = 200  # findings shown in the report; all of them are in the results file
GOOD = frozenset({"equal", "verified"})
MEANING: Mapping[str, str] = {
    "equal": "answered again, every bit the same",
    "verified": "the line holds what its digests and its signature, if any, say; nobody was asked",
    "differs": "answered again, and some bit differs",
    "other_fingerprint": "the server's numerics are not those of the receipt",
    "other_model": "the receipt is of a model that the server doesn't serve",
    "edited": "the line contradicts itself, or its signature does not hold",
    "unreadable": "the line is no whole receipt",
    "not_replayable": "digests only: can be verified, not asked again",
    "refused": "the server refused to answer",
}


@dataclass
class Tally:
    """Counts of everything found so far. Its size depends on answer lengths, not on the number of
    receipts.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first_differences: Counter[int] = field(default_factory=Counter)  # token index -> answers
    lengths: Counter[int] = field(default_factory=Counter)  # tokens in the answer -> answers
    compared: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: Mapping[str, Any]) -> None:
        status = result["status"]
        self.counts[status] += 1
        if "num_tokens" in result:
            self.lengths[result["num_tokens"]] += 1
        for name in result.get("compared", ()):
            self.compared[name] += 1
        difference = result.get("difference")
        if difference:
            self.first_differences[difference["token"]] += 1
        for reason in result.get("reasons", ()):
            self.reasons[reason] += 1
        if status not in GOOD and len(self.findings) < KEPT:
            self.findings.append(dict(result))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def good(self) -> int:
        return sum(self.counts[status] for status in GOOD)

    @property
    def clean(self) -> bool:
        """Everything that stands in the file was asked again and came back the same, or holds
        where nobody was to be asked.
        """
        return self.total > 0 and self.good == self.total


def report(
    tally: Tally, *, server: Mapping[str, Any], sources: Sequence[str], complete: bool
) -> dict[str, Any]:
    """The JSON report."""
    return {
        "schema": SCHEMA,
        "server": dict(server),
        "sources": list(sources),
        "complete": complete,
        "clean": tally.clean and complete,
        "counts": {status: tally.counts[status] for status in MEANING if tally.counts[status]},
        "compared": dict(tally.compared),
        "named_differences": dict(tally.reasons.most_common(50)),
        "first_differences": {str(k): v for k, v in sorted(tally.first_differences.items())},
        "findings": tally.findings,
    }


def write(path: Path, tally: Tally, body: Mapping[str, Any]) -> None:
    """`path` (JSON) and beside it the same name with .html."""
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    for target, content in ((path, text), (path.with_suffix(".html"), page(tally, body))):
        target.write_text(content, encoding="utf-8", errors="backslashreplace")


def page(tally: Tally, body: Mapping[str, Any]) -> str:
    """One self-contained page: the verdict, the picture, the counts, the first findings."""
    verdict = "Every answer came back the same, bit for bit." if body["clean"] else "Not the same."
    if tally.counts["verified"]:
        verdict = "Every line holds." if body["clean"] else "Not every line holds."
        verdict += " Nobody was asked."
    if not body["complete"]:
        verdict = "Stopped before the end. " + verdict
    counts = "".join(
        f"<tr><td>{name.replace('_', ' ')}</td><td class=n>{count}</td>"
        f"<td>{MEANING[name]}</td></tr>"
        for name, count in body["counts"].items()
    )
    reasons = "".join(
        f"<li>{html.escape(reason)} <span class=n>× {count}</span></li>"
        for reason, count in body["named_differences"].items()
    )
    rows = "".join(_row(finding) for finding in body["findings"])
    server = html.escape(
        f"{body['server'].get('base_url')} {body['server'].get('fingerprint') or ''}"
    )
    return _PAGE.format(
        verdict=html.escape(verdict),
        css="good" if body["clean"] else "bad",
        server=server,
        sources=html.escape(", ".join(body["sources"])),
        picture=picture(tally),
        counts=counts,
        reasons=f"<h2>What differs in the numerics</h2><ul>{reasons}</ul>" if reasons else "",
        findings=f"<h2>First findings</h2><div class=w><table>{rows}</table></div>" if rows else "",
    )


def picture(tally: Tally, width: int = 720, height: int = 220) -> str:
    """Where along the answers the first differences fall: bars of answers, by token, over what is
    still the same.
    """
    left, bottom, top = 44, height - 34, 14
    longest = max([1, *tally.lengths, *(k + 1 for k in tally.first_differences)])
    bins = min(longest, 60)
    per_bin = -(-longest // bins)
    found = [0] * bins
    for token, count in tally.first_differences.items():
        found[min(token // per_bin, bins - 1)] += count
    most = max(found)
    step = (width - left - 10) / bins
    bars = "".join(
        f'<rect class="bar" x="{left + i * step:.1f}" y="{bottom - (bottom - top) * n / most:.1f}" '
        f'width="{max(step - 1, 1):.1f}" height="{(bottom - top) * n / most:.1f}">'
        f"<title>tokens {i * per_bin}–{(i + 1) * per_bin - 1}: {n} answers</title></rect>"
        for i, n in enumerate(found)
        if n
    )
    note = (
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{most}</text>'
        if most
        else f'<text class="big" x="{width / 2}" y="{(top + bottom) / 2}" text-anchor="middle">'
        f"no difference in {tally.counts['equal']} answers</text>"
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="first differences by token">'
        f'<line x1="{left}" y1="{bottom}" x2="{width - 10}" y2="{bottom}"/>'
        f'<line x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>{bars}{note}'
        f'<text x="{left}" y="{bottom + 16}">0</text>'
        f'<text x="{width - 10}" y="{bottom + 16}" text-anchor="end">{longest}</text>'
        f'<text x="{(left + width) / 2}" y="{bottom + 30}" text-anchor="middle">'
        "token of the answer at which it first differs</text></svg>"
    )


def _row(finding: Mapping[str, Any]) -> str:
    where = f"{finding.get('source')}:{finding.get('line')}"
    said = finding.get("words") or finding.get("fault") or ""
    status = str(finding["status"]).replace("_", " ")
    cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in (where, status, said))
    return f"<tr>{cells}</tr>"


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Samebits replay</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>
:root{{color-scheme:light
dark;--fg:#1b1f24;--bg:#fff;--soft:#667;--line:#ccd;--bad:#c0392b;--good:#1e8449}}
@media(prefers-color-scheme:dark){{:root{{--fg:#e6e8eb;--bg:#14171a;--soft:#9aa4b0;--line:#39424d;--bad:#ff7b6b;
--good:#5fd38d}}}} body{{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem
auto;padding:0 1rem;color:var(--fg);
background:var(--bg)}}h1{{font-size:1.4rem}}h1.good{{color:var(--good)}}h1.bad{{color:var(--bad)}}
h2{{font-size:1.05rem;margin-top:2rem}}p{{color:var(--soft);overflow-wrap:anywhere}}.w{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%}}td{{padding:.3rem .6rem .3rem 0;border-bottom:1px solid
var(--line);
vertical-align:top}}.n{{text-align:right;font-variant-numeric:tabular-nums}}svg{{width:100%;height:auto;
font:12px system-ui,sans-serif;fill:var(--soft)}}svg
line{{stroke:var(--line)}}.bar{{fill:var(--bad)}}.big{{font-size:16px}} </style><h1
class="{css}">{verdict}</h1><p>{server}<br>{sources}</p>{picture}
<h2>Counts</h2><table>{counts}</table>{reasons}{findings}</html>
"""
