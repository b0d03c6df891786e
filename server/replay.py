"""`samebits replay receipts.jsonl --base-url …`: ask everything again, in another order and at
once, and compare.

Exit codes: 0 every answer came back the same; 1 something differs, was edited or could not be
replayed; 2 bad arguments or files; 3 stopped before the end (the server went away, or Ctrl-C): the
same command goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from config import settings as configuration
from server import fingerprint, replay_report
from server.asking import Asker, Refused, Server, Unreachable
from server.comparison import compare, in_words
from server.receiptfile import Entry, Reader, shuffled
from server.replay_report import Tally
from server.results import OtherRun, Results

WIDEST = 240  # characters of a finding on the screen; the report has all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="receipts logs (JSON lines)")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="server to ask")
    parser.add_argument("--api-key", help="bearer key; default: the variable OPENAI_API_KEY")
    parser.add_argument("--model", help="name to ask for; default: the one in each receipt")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once (32)")
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--shuffle-seed", type=int, default=0, help="another order (0)")
    parser.add_argument("--public-key", help="accept only receipts signed with this key (hex)")
    parser.add_argument("--verify-only", action="store_true", help="check the lines, ask nothing")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a server")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--report", type=Path, help="JSON report; default: <file>.replay.json")
    parser.add_argument(
        "--results", type=Path, help="results so far; default: <file>.results.jsonl"
    )
    parser.add_argument("--restart", action="store_true", help="forget the results so far")


def run(args: argparse.Namespace) -> int:
    """The command. Prints to standard error; returns the exit code."""
    console = Console(stderr=True)
    first: Path = args.files[0]
    args.report = args.report or first.with_suffix(".replay.json")
    args.results = args.results or first.with_suffix(".results.jsonl")
    if args.concurrency < 1:
        console.print("--concurrency: at least 1", style="red")
        return 2
    try:
        return asyncio.run(_Replay(args, console).run())
    except (OSError, OtherRun) as fault:
        console.print(str(fault), style="red", highlight=False)
        return 2
    except Refused as fault:
        console.print(f"{args.base_url}: {fault}", style="red", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 3


class _Replay:
    """One run."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.reader = Reader(args.files, args.public_key)
        self.tally = Tally()
        self.server = Server(args.base_url)
        self.sources = [str(path) for path in args.files]

    async def run(self) -> int:
        args = self.args
        environment = configuration.environment()
        asker = Asker(
            args.base_url,
            api_key=args.api_key or environment.get("OPENAI_API_KEY"),
            concurrency=args.concurrency,
            timeout_s=args.timeout,
            patience_s=args.patience,
        )
        async with asker:
            try:
                if not args.verify_only:
                    self.server = await asker.meet()
            except Unreachable as fault:
                self.console.print(f"no server: {fault}", style="red", highlight=False)
                return 3
            head = {"sources": self.sources, "fingerprint": self.server.fingerprint}
            self.results = Results(args.results, head, restart=args.restart, seen=self.tally.add)
            if self.results.resumed:
                self.console.print(f"going on after {self.results.resumed} results")
            try:
                stopped = await self._all(asker)
            finally:
                self.results.close()
        return self._finish(stopped)

    async def _all(self, asker: Asker) -> str | None:
        """Every entry through `concurrency` workers. What stopped the run early, or None."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        stopped: str | None = None
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("replay", total=self.reader.total_bytes)
            entries = self._entries()

            async def work() -> None:
                for entry in entries:  # one iterator for all workers: each takes the next
                    self._record(entry, await self._one(asker, entry))
                    text = f"{self.tally.total} asked, {self._bad()} not the same"
                    progress.update(task, advance=entry.num_bytes, description=text)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.args.concurrency):
                        group.create_task(work())
            except* Unreachable as faults:
                stopped = str(faults.exceptions[0])
        return stopped

    def _entries(self) -> Iterator[Entry]:
        entries = self.reader.entries()
        if not self.args.in_order:
            entries = shuffled(entries, random.Random(self.args.shuffle_seed))
        return (entry for entry in entries if (entry.source, entry.line) not in self.results.done)

    async def _one(self, asker: Asker, entry: Entry) -> dict[str, Any]:
        """The result of one line."""
        if entry.status:
            return {"status": entry.status, "fault": entry.fault}
        receipt = entry.record["receipt"]
        if entry.record.get("request") is None or entry.record.get("answer") is None:
            return {"status": "not_replayable"}
        if self.args.verify_only:
            return {"status": "equal", "compared": ["digests"]}
        model = self.args.model or receipt["model"]
        if model not in self.server.models:
            known = ", ".join(self.server.models)
            return {"status": "other_model", "fault": f"{model!r} is not served here ({known})"}
        try:
            reply = await asker.ask(entry.record, model)
        except Refused as fault:
            return {"status": "refused", "fault": str(fault)}
        verdict = compare(entry.record["answer"], reply)
        result: dict[str, Any] = {
            "status": "differs" if verdict.difference else "equal",
            "num_tokens": receipt["num_tokens"],
            "compared": list(verdict.compared),
        }
        if verdict.difference:
            result["difference"] = verdict.difference
            result["words"] = in_words(verdict.difference)
        if not verdict.compared:
            result = {"status": "refused", "fault": "the server returned nothing to compare"}
        return self._with_fingerprints(result, receipt["fingerprint"], reply.fingerprint)

    def _with_fingerprints(
        self, result: dict[str, Any], recorded: str, returned: str | None
    ) -> dict[str, Any]:
        """Another fingerprint of ours is a finding of its own, whether the bits differ or not."""
        if not returned or not returned.startswith(fingerprint.PREFIX) or returned == recorded:
            return result
        bits = result.get("words") or "the answer is the same all the same"
        mine, its = self.reader.trees.get(recorded), self.server.tree
        named = [d.words for d in fingerprint.diff(mine, its)] if mine and its else []
        return {
            **result,
            "status": "other_fingerprint",
            "reasons": named,
            "words": f"{recorded} / {returned}: {'; '.join(named) or 'not named'}. {bits}",
        }

    def _record(self, entry: Entry, result: dict[str, Any]) -> None:
        line = {"source": self.sources[entry.source], "line": entry.line, **result}
        self.tally.add(line)
        self.results.add(line)

    def _bad(self) -> int:
        return self.tally.total - self.tally.counts[replay_report.GOOD]

    def _finish(self, stopped: str | None) -> int:
        server = {"base_url": self.args.base_url, "fingerprint": self.server.fingerprint}
        body = replay_report.report(
            self.tally, server=server, sources=self.sources, complete=stopped is None
        )
        replay_report.write(self.args.report, self.tally, body)
        say = self.console.print
        for status, count in body["counts"].items():
            say(f"{count:>8} {status.replace('_', ' ')}: {replay_report.MEANING[status]}")
        for reason, count in list(body["named_differences"].items())[:10]:
            say(f"         {reason} (× {count})", markup=False)
        for finding in self.tally.findings[:10]:
            said = finding.get("words") or finding.get("fault") or finding["status"]
            said = said if len(said) <= WIDEST else said[:WIDEST] + " …"
            say(f"  {finding['source']}:{finding['line']}: {said}", markup=False, highlight=False)
        say(f"report: {self.args.report} and {self.args.report.with_suffix('.html').name}")
        if stopped:
            say(f"stopped: {stopped}; the same command goes on from here", style="red")
            return 3
        if self.tally.total == 0:
            say("no receipts in these files", style="red")
            return 2
        return 0 if body["clean"] else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="samebits replay", description=__doc__)
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
