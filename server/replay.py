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
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from config import settings as configuration
from server import fingerprint, replay_report
from server.asking import Asker, CantAsk, Refused, Server, Unreachable, root_of
from server.comparison import compare, held, in_words
from server.receiptfile import Entry, Reader, shuffled
from server.replay_report import Tally
from server.results import OtherRun, Results, is_results

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
    args.api_key = args.api_key or configuration.environment().get("OPENAI_API_KEY")
    try:
        _check(args)
        return asyncio.run(_Replay(args, console).run())
    except (OSError, OtherRun, BadArgument, Refused) as fault:
        console.print(Text(visible(str(fault)), style="red"))
        return 2
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 3


class BadArgument(ValueError):
    """An argument that can't be meant. The message names it."""


def _check(args: argparse.Namespace) -> None:
    """What can be said of the arguments before anything is done."""
    if args.concurrency < 1:
        raise BadArgument("--concurrency: at least 1")
    try:
        url = httpx.URL(root_of(args.base_url))
    except (httpx.InvalidURL, UnicodeError) as fault:
        raise BadArgument(f"--base-url: {fault}") from None
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        raise BadArgument(f"--base-url: {args.base_url} is no http:// or https:// address")
    if args.api_key and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise BadArgument("the API key has a character that no header can carry")
    if args.public_key and not re.fullmatch("[0-9a-f]{64}", args.public_key.strip().lower()):
        raise BadArgument("--public-key: should be 64 hexadecimal digits")
    for target in (args.report, args.report.with_suffix(".html"), args.results):
        if any(target.exists() and target.samefile(path) for path in args.files if path.exists()):
            raise BadArgument(f"{target}: would overwrite the receipts themselves")


def visible(text: str) -> str:
    """A line from elsewhere for the screen: what would steer a terminal is shown, not sent."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Replay:
    """One run."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        files = [path for path in args.files if not is_results(path)]
        if len(files) < len(args.files):
            console.print(f"{len(args.files) - len(files)} files left out: results of replays")
        self.reader = Reader(files, args.public_key)
        self.tally = Tally()
        self.server = Server(args.base_url)
        self.sources = [str(path) for path in files]

    async def run(self) -> int:
        args = self.args
        asker = Asker(
            args.base_url,
            api_key=args.api_key,
            concurrency=args.concurrency,
            timeout_s=args.timeout,
            patience_s=args.patience,
        )
        async with asker:
            try:
                if not args.verify_only:
                    self.server = await asker.meet()
            except Unreachable as fault:
                self.console.print(Text(visible(f"no server: {fault}"), style="red"))
                return 3
            self.results = Results(
                args.results,
                self._head(),
                self.reader.sizes,
                restart=args.restart,
                seen=self.tally.add,
            )
            if self.results.resumed:
                self.console.print(f"going on after {self.results.resumed} results")
            try:
                stopped = await self._all(asker)
                if stopped is None:
                    self.results.complete()
            finally:
                self.results.close()
        return self._finish(stopped)

    def _head(self) -> dict[str, Any]:
        """What results must have been made with, for this run to go on after them."""
        asked = self.server.fingerprint or self.args.base_url
        return {
            "sources": self.sources,
            "server": None if self.args.verify_only else asked,
            "model": self.args.model,
            "public_key": self.args.public_key,
        }

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
            except* OSError as faults:  # a source that can't be read, a disk that is full
                raise faults.exceptions[0] from None
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
        if self.args.verify_only:
            return {"status": "verified", "compared": held(entry.record)}
        if entry.record.get("request") is None or entry.record.get("answer") is None:
            return {"status": "not_replayable"}
        model = self.args.model or receipt["model"]
        if model not in self.server.models:
            known = ", ".join(self.server.models)
            return {"status": "other_model", "fault": f"{model!r} is not served here ({known})"}
        try:
            reply = await asker.ask(entry.record, model)
        except Refused as fault:
            return {"status": "refused", "fault": str(fault)}
        except CantAsk as fault:
            return {"status": "unreadable", "fault": str(fault)}
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
        mine = self.reader.trees.get(recorded)
        # Another one than at the start: the server was replaced meanwhile, and its tree is unknown.
        its = self.server.tree if returned == self.server.fingerprint else None
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
        return self.tally.total - self.tally.good

    def _finish(self, stopped: str | None) -> int:
        server = {"base_url": self.args.base_url, "fingerprint": self.server.fingerprint}
        body = replay_report.report(
            self.tally, server=server, sources=self.sources, complete=stopped is None
        )
        replay_report.write(self.args.report, self.tally, body)
        say = partial(self.console.print, highlight=False, soft_wrap=True)
        for status, count in body["counts"].items():
            say(f"{count:>8} {status.replace('_', ' ')}: {replay_report.MEANING[status]}")
        for reason, count in list(body["named_differences"].items())[:10]:
            say(Text(visible(f"         {reason} (× {count})")))
        for finding in self.tally.findings[:10]:
            said = finding.get("words") or finding.get("fault") or finding["status"]
            said = said if len(said) <= WIDEST else said[:WIDEST] + " …"
            say(Text(visible(f"  {finding['source']}:{finding['line']}: {said}")))
        html = self.args.report.with_suffix(".html").name
        say(Text(visible(f"report: {self.args.report} and {html}")))
        if stopped:
            say(Text(visible(f"stopped: {stopped}; the same command goes on from here"), "red"))
            return 3
        if self.tally.total == 0:
            say("no receipts in these files", style="red")
            return 2
        return 0 if body["clean"] else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="samebits replay", description=__doc__)
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
