"""`samebits batch in.jsonl -o out.jsonl`: answer a file, with the server's own code and the same
bits, without a port.

Exit codes: 0 every line answered; 1 some lines were refused or failed (they say why); 2 the files
or the start are at fault; 3 stopped before the end: the same command goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.batchfile import BadFile, Output, Task, read_tasks

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress, TaskID

    from config.settings import Settings
    from server.engine import Engine

DONE, FAILED, CANNOT, STOPPED = 0, 1, 2, 3
GONE = frozenset({502, 503})  # the engine is going down: no answer to this line
NO_LIMIT_S = 1e9


class EngineGone(Exception):
    """The engine died or could not be opened."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from server.cli import add_settings

    parser.add_argument("input", type=Path, help="requests (JSON lines) or prompts, one a line")
    parser.add_argument("-o", "--output", type=Path, required=True, help="answers (JSON lines)")
    parser.add_argument(
        "--body", default="{}", help='fields for every request: \'{"max_tokens": 64, "seed": 1}\''
    )
    parser.add_argument("--concurrency", type=int, help="lines at once; default: 2 × max_num_seqs")
    parser.add_argument("--mix", action="store_true", help="go on under another fingerprint")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from config.determinism import Conflict
    from config.settings import SettingsError

    try:
        defaults = _defaults(args)
        from server.cli import start_from

        start = start_from(args)
    except (BadFile, SettingsError, Conflict) as fault:
        return _fail(fault)
    except Exception as fault:
        if not hasattr(fault, "exit_code"):
            raise
        return _fail(fault)
    from server.vllm_engine import open_engine

    logging.getLogger("samebits.http").setLevel(
        logging.WARNING
    )  # a line per request is the output's
    job = Batch(args.input, args.output, defaults, args.concurrency, args.mix)
    try:
        return asyncio.run(job.run(start.settings, lambda _: open_engine(start)))
    except (OSError, BadFile) as fault:
        return _fail(fault)
    except EngineGone as fault:
        _fail(fault)
        return STOPPED if job.opened else CANNOT
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return STOPPED


class Batch:
    """One run over one file."""

    def __init__(
        self,
        source: Path,
        target: Path,
        defaults: dict[str, Any] | None = None,
        concurrency: int | None = None,
        mix: bool = False,
    ) -> None:
        self._source, self._target = source, target
        self._defaults, self._concurrency, self._mix = defaults or {}, concurrency, mix
        self.opened = False
        self.twice = 0  # lines left out, since their custom_id stood before

    async def run(
        self, settings: Settings, open_engine: Callable[[Settings], Awaitable[Engine]]
    ) -> int:
        """Open the engine, answer everything, close it. Raises `BadFile`, `OSError`,
        `EngineGone`.
        """
        import httpx

        from server.app import create_app

        # Nobody comes in from outside: no keys. What a client may not do, a line may not either.
        # Nor does anybody wait: a line may take its time, unless a limit was set for it.
        free: dict[str, Any] = {"api_keys": None, "api_keys_file": None}
        if "request_timeout_s" not in settings.model_fields_set:
            free["request_timeout_s"] = NO_LIMIT_S
        settings = settings.model_copy(update=free)
        app = create_app(settings, open_engine)
        async with app.router.lifespan_context(app):
            engine = await _engine(app.state.service)
            self.opened = True
            output = Output(self._target, engine.fingerprint, mix=self._mix)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)
            try:
                async with client:
                    at_once = self._concurrency or 2 * settings.max_num_seqs
                    await self._answer_all(client, output, max(1, at_once))
            finally:
                output.close()
        return FAILED if output.failed else DONE

    async def _answer_all(self, client: httpx.AsyncClient, output: Output, at_once: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if output.resumed:
            console.print(f"{output.resumed} lines are done already; going on")
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("batch", total=self._source.stat().st_size)
            tasks = self._tasks(output, progress, bar)
            workers = [
                asyncio.create_task(self._work(tasks, client, output, progress, bar))
                for _ in range(at_once)
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if self.twice:
            console.print(f"{self.twice} lines not asked: their custom_id stood in a line before")

    async def _work(
        self,
        tasks: Iterator[Task],
        client: httpx.AsyncClient,
        output: Output,
        progress: Progress,
        bar: TaskID,
    ) -> None:
        for task in tasks:  # one iterator for all workers: each takes the next
            output.add(task, await _answer(client, task) if task.fault is None else None)
            text = f"batch, {output.failed} failed" if output.failed else "batch"
            progress.update(bar, advance=task.num_bytes, description=text)

    def _tasks(self, output: Output, progress: Progress, bar: TaskID) -> Iterator[Task]:
        """What is left to do. A custom_id that comes twice in the input is answered once."""
        for task in read_tasks(self._source, self._defaults):
            if output.take(task):
                yield task
                continue
            progress.update(bar, advance=task.num_bytes)
            if not output.resumed:  # else it may be a line that an earlier run answered
                self.twice += 1


async def _answer(client: httpx.AsyncClient, task: Task) -> dict[str, Any]:
    """The response to one line, waiting while the queue is full. Raises `EngineGone`."""
    pause_s = 0.05
    # What JSON proper lacks (NaN, half a surrogate pair) goes along: the server names its field.
    content, kind = json.dumps(task.body), {"content-type": "application/json"}
    while True:
        response = await client.post(task.url, content=content, headers=kind)
        if response.status_code in GONE:
            raise EngineGone(response.json()["error"]["message"])
        if response.status_code != 429:
            break
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)
    return {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": response.json(),
    }


async def _engine(service: Any) -> Engine:
    """The engine, once it is open. Raises `EngineGone` with the reason when it can't be."""
    while service.engine is None:
        if service.failure is not None:
            raise EngineGone(str(service.failure))
        await asyncio.sleep(0.02)
    engine: Engine = service.engine
    return engine


def _defaults(args: argparse.Namespace) -> dict[str, Any]:
    """`--body`, checked before anything is loaded; so is that the input is there."""
    if not args.input.is_file():
        raise BadFile(f"{args.input}: no such file")
    if args.concurrency is not None and args.concurrency < 1:
        raise BadFile("--concurrency: at least 1")
    if args.output.exists() and args.output.samefile(args.input):
        raise BadFile(f"{args.output}: input and output are the same file")
    try:
        body = json.loads(args.body)
    except ValueError as fault:
        raise BadFile(f"--body: no JSON ({fault})") from None
    if not isinstance(body, dict):
        raise BadFile("--body: should be a JSON object")
    return body


def _fail(fault: BaseException) -> int:
    sys.stderr.write(f"samebits batch: {fault}\n")
    return int(getattr(fault, "exit_code", CANNOT))
