"""`samebits check`: the long check of every op on every rank, written to a report.

On an NPU it is the acceptance run of `ops.hardware_check`, in a process of its own, because it
starts several engines one after another. Exit codes: 0 all equal; 3 something is not; 2 no start.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from server.cli import add_settings

    parser.add_argument("--out", default="samebits-check.json", help="the report")
    parser.add_argument("--models", nargs="+", default=[], help="npu: models to run end to end")
    parser.add_argument("--tp", nargs="+", default=[], help="npu: tensor-parallel sizes to run")
    parser.add_argument(
        "--quick", action="store_true", help="npu: few rows, narrow ops, short prompts"
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from config.determinism import Conflict
    from config.device import detect
    from config.settings import SettingsError
    from server.cli import fail, settings_from, start_from

    try:
        settings = settings_from(args)
        if detect(settings.device).kind == "npu":
            return on_npu(args, settings.tensor_parallel_size)
        start = start_from(args)
        return asyncio.run(_here(start, Path(args.out)))
    except (SettingsError, Conflict) as fault:
        return fail(fault)
    except RuntimeError as fault:
        if not hasattr(fault, "exit_code"):
            raise
        return fail(fault)


def on_npu(args: argparse.Namespace, tensor_parallel_size: int) -> int:
    """The acceptance run, told which models and sizes."""
    command = [sys.executable, "-m", "ops.hardware_check", "--out", args.out]
    models = args.models or ([args.set_model] if args.set_model else [])
    for model in models:
        command += ["--model", model]
    command += ["--tp", *(args.tp or [str(tensor_parallel_size)])]
    if args.set_max_model_len:
        command += ["--max-model-len", str(args.set_max_model_len)]
    if args.set_dtype:
        command += ["--dtype", args.set_dtype]
    command += ["--quick"] if args.quick else []
    return subprocess.run(command, check=False).returncode


async def _here(start: Any, out: Path) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ops.selfcheck import condition
    from server import check_report, engine_probe
    from server.vllm_engine import open_engine

    began = time.monotonic()
    engine = await open_engine(start)
    ranks: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            ops = engine.ops()
            bar = progress.add_task("ops", total=len(ops))
            for op in ops:
                progress.update(bar, description=op)
                for rank, found in enumerate(await engine.check_long(op)):
                    ranks += [{}] * (rank + 1 - len(ranks))
                    ranks[rank] = ranks[rank] | found
                progress.advance(bar)
            bar = progress.add_task("through the engine")
            through = await engine_probe.long(
                engine, lambda done, total: progress.update(bar, completed=done, total=total)
            )
        found = check_report.report(
            device=start.device,
            fingerprint=engine.fingerprint,
            seconds=round(time.monotonic() - began, 1),
            ranks=ranks,
            engine=through,
        )
    finally:
        await engine.close()
    page = check_report.write(out, found, condition)
    return summary([*ranks, through], out, page)


def summary(
    tables: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]], out: Path, page: Path
) -> int:
    """One line per op of each rank, then one per probe through the engine (the last table); 0 if
    every case held, else 3.
    """
    held = True
    for rank, ops in enumerate(tables):
        where = f"rank {rank}" if rank + 1 < len(tables) else "engine"
        for op, cases in ops.items():
            wrong = [case for case in cases if not case["ok"]]
            held = held and not wrong
            verdict = f"{len(cases)} cases equal" if not wrong else wrong[0]["message"]
            sys.stdout.write(f"{where}  {op}: {verdict}\n")
    sys.stdout.write(f"{'all equal' if held else 'NOT EQUAL'}; report: {out}, {page}\n")
    return 0 if held else 3
