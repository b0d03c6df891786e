"""`samebits doctor`: what this machine can promise, in plain words, and what stands in the way.

Exit codes: 0 `samebits serve` with the same settings would start; 1 it would not, or only a start
can tell. It needs no device to explain one. `--start` also loads the model, checks every op, and
closes again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from server.examination import (
    BAD,
    OK,
    SLOW,
    UNKNOWN,
    Finding,
    conflicts,
    device,
    kernels,
    model,
    places,
    plugin,
    python,
    versions,
)

MARKS = {OK: "[green]✓[/]", SLOW: "[yellow]![/]", UNKNOWN: "[yellow]?[/]", BAD: "[red]✗[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from server.cli import add_settings

    parser.add_argument(
        "--start", action="store_true", help="load the model and check every op too"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    findings = list(examine(args))
    fit = all(f.state in (OK, SLOW) for f in findings)
    if fit and args.start:
        findings.append(_started(args))
    elif args.start and not any(f.state == BAD for f in findings):
        findings = [f for f in findings if f.state != UNKNOWN] + [_started(args)]
    fit = all(f.state in (OK, SLOW) for f in findings)
    if args.json:
        report = {"would_start": fit, "findings": [asdict(f) for f in findings]}
        sys.stdout.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    else:
        _say(findings, fit)
    return 0 if fit else 1


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Every finding, cheap ones first. What can't be judged without settings is left out when they
    are bad.
    """
    from config import settings as configuration
    from config.device import detect
    from server.cli import settings_from

    yield python()
    try:
        settings = settings_from(args)
    except configuration.SettingsError as fault:
        for line in str(fault).splitlines():
            yield Finding("settings", BAD, line, "correct or unset it")
        return
    yield Finding("settings", OK, "every SAMEBITS_ key is known and well-formed")
    found = detect(settings.device)
    yield device(found)
    yield from versions(found.kind)
    yield plugin()
    yield from conflicts(settings, found.kind, configuration.environment())
    yield kernels(found.kind)
    yield from model(settings)
    yield from places(settings)


def _started(args: argparse.Namespace) -> Finding:
    """The start itself, without a port."""
    from server.cli import start_from

    async def once() -> str:
        from server.vllm_engine import open_engine

        engine = await open_engine(start_from(args))
        fingerprint = engine.fingerprint
        await engine.close()
        return str(fingerprint)

    try:
        fingerprint = asyncio.run(once())
    except Exception as fault:
        if not hasattr(fault, "exit_code"):
            raise
        return Finding("start", BAD, str(fault), "see the message")
    return Finding("start", OK, f"every op passed its check; fingerprint {fingerprint}")


def _say(findings: list[Finding], fit: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table: Any = Table(box=None, show_header=False, padding=(0, 1))
    for finding in findings:
        words = escape(finding.words)
        if finding.remedy:
            words += f"\n[dim]→ {escape(finding.remedy)}[/]"
        table.add_row(MARKS[finding.state], finding.name, words)
    console = Console()
    console.print(table)
    console.print(f"\n{_verdict(findings, fit)}", highlight=False)


def _verdict(findings: list[Finding], fit: bool) -> str:
    """One sentence."""
    off = any(f.name == "promise" for f in findings)
    if fit and off:
        return "`samebits serve` would start, without the promise."
    if fit:
        return (
            "`samebits serve` would start. Same request, same seed, same fingerprint: same bits, "
            "whatever else runs beside it."
        )
    faults = dict.fromkeys(f.name for f in findings if f.state == BAD)
    if faults:
        return f"`samebits serve` would not start: {', '.join(faults)}."
    names = ", ".join(f.name for f in findings if f.state == UNKNOWN)
    return f"Whether `samebits serve` would start, only a start can tell ({names})."
