"""Load of all kinds on one server for as long as you like, and what changed meanwhile.

    .venv/bin/python -m tests.endurance.soak            # 10 minutes; or: make soak
    .venv/bin/python -m tests.endurance.soak --hours 8  # or: make soak HOURS=8

More clients than the queue admits ask short and long, streamed and plain things, leave in the
middle, and send invalid bodies. Meanwhile fixed probes are asked over and over. Exit code 1 if a
probe's bits changed, memory grew, a request stayed in the engine, or anything answered what it
should not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.endurance.served import (
    MODEL,
    Findings,
    Served,
    bits,
    body,
    health,
    joined,
    open_files,
    rss_bytes,
    until,
)

# A small KV cache, batch and queue: preemption, chunked prefill and refusals all the time.
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 48 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_queue": 20,
    "receipts_max_bytes": 1 << 20,
}
CLIENTS = 24
KEPT = 8  # idle connections
SAMPLE_S = 10.0
MOST_GROWTH = 0.02
WORDS = ("the sea", "a clock", "nine birds", "old iron", "rain", "two roads", "a letter", "salt")
Body = dict[str, Any]


def probes() -> dict[str, Body]:
    """Fixed requests; the answer of each may never change by a bit."""
    long = " ".join(f"{number} bottles of {WORDS[number % 8]}" for number in range(60))
    return {
        "greedy": body(temperature=0, seed=None),
        "seeded": body(),
        "seeded, streamed": body(stream=True, stream_options={"include_usage": True}),
        "long prompt": body(prompt=long, max_tokens=8, logprobs=3),
        "long prompt, streamed": body(
            prompt=long,
            max_tokens=8,
            logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
        ),
        "two choices, filters": body(n=2, top_p=0.9, top_k=50, max_tokens=12, seed=-1),
        "penalties": body(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
        "long answer": body(max_tokens=120, logprobs=None, ignore_eos=True, seed=7),
    }


INVALID: list[tuple[Body | bytes, int]] = [
    (body(sede=1), 400),
    (body(temperature=-1), 400),
    (body(seed=2**63), 400),
    (body(stop_token_ids=[10**9]), 400),
    (body(logit_bias={"49152": 1}), 400),
    (body(prompt=""), 400),
    (body(prompt="x " * 5000), 400),
    (body(n=1000), 400),
    (body(model="nobody"), 404),
    (b'{"model": "x", "prompt": NaN}', 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413),
]


@dataclass
class Soak:
    """One run: the client, what it counted, and until when it goes on."""

    client: httpx.AsyncClient
    served: Served
    stops: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    wanted: dict[str, str] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    slowest_health_s: float = 0.0
    idle_files: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # front end, engine, files

    def on(self) -> bool:
        return time.monotonic() < self.stops

    def fault(self, words: str) -> None:
        self.counts["unexpected"] += 1
        if len(self.faults) < 10:
            self.faults.append(words[:300])

    # --- probes

    async def probe(self, name: str, asked: Body) -> str | None:
        """The bits of a probe; None when the queue was full."""
        try:
            answer = await self.client.post("/v1/completions", json=asked)
        except httpx.HTTPError as fault:
            self.fault(f"probe {name}: {fault!r}")
            return None
        if answer.status_code == 429:
            self.counts["probe 429"] += 1
            return None
        if answer.status_code != 200:
            self.fault(f"probe {name}: {answer.status_code} {answer.text}")
            return None
        return bits(joined(answer.text) if asked.get("stream") else answer.json())

    async def probing(self, name: str, asked: Body) -> None:
        """Ask it for ever, and compare with the answer it had alone."""
        while self.on():
            found = await self.probe(name, asked)
            if found is None:
                await asyncio.sleep(0.2)
                continue
            self.rounds[name] += 1
            if found != self.wanted[name]:
                self.changed[name] += 1
            await asyncio.sleep(self.chance.uniform(0, 1))

    # --- load

    async def loading(self) -> None:
        kinds = (self.plain, self.stream, self.leave_stream, self.leave_plain, self.invalid)
        while self.on():
            kind = self.chance.choices(kinds, (5, 5, 3, 2, 2))[0]
            name = kind.__name__
            try:
                self.counts[f"{name}: {await kind()}"] += 1
            except httpx.HTTPError as fault:
                self.fault(f"{name}: {fault!r}")

    def ask(self) -> Body:
        """Some request: any length of prompt and answer, any options."""
        pick = self.chance
        words = " ".join(pick.choice(WORDS) for _ in range(int(pick.expovariate(1 / 40)) % 300 + 1))
        options: Body = {
            "prompt": words,
            "max_tokens": min(1 + int(pick.expovariate(1 / 30)), 200),
            "temperature": pick.choice([0, 0.5, 1, 1.5]),
            "seed": pick.choice([None, pick.randrange(2**53)]),
            "n": pick.choice([1, 1, 1, 2, 3]),
            "logprobs": pick.choice([None, 0, 5]),
        }
        options |= pick.choice(
            [{}, {"top_k": 20}, {"min_p": 0.1}, {"ignore_eos": True}, {"stop": "."}]
        )
        return body(**options)

    async def plain(self) -> int:
        answer = await self.client.post("/v1/completions", json=self.ask())
        return await self._expected(answer.status_code, answer.text)

    async def stream(self) -> int:
        asked = self.ask() | {"stream": True}
        answer = await self.client.post("/v1/completions", json=asked)
        if answer.status_code == 200 and not answer.text.endswith("data: [DONE]\n\n"):
            self.fault(f"a stream without its end: …{answer.text[-200:]}")
        if 'data: {"error"' in answer.text and answer.status_code == 200:
            self.fault(f"an error in a stream: …{answer.text[-200:]}")
        return await self._expected(answer.status_code, answer.text)

    async def leave_stream(self) -> int:
        """Read some events, and leave."""
        asked = self.ask() | {"stream": True, "max_tokens": 200, "ignore_eos": True, "stop": None}
        async with self.client.stream("POST", "/v1/completions", json=asked) as answer:
            left = self.chance.randrange(8)
            async for _ in answer.aiter_lines():
                if (left := left - 1) < 0:
                    break
        return await self._expected(answer.status_code, "left")

    async def leave_plain(self) -> int | str:
        """Leave before the answer, as early as while the request is being added.

        With a client of its own: httpx keeps the socket of a cancelled connection attempt for good.
        """
        asked = self.ask() | {"max_tokens": 200, "ignore_eos": True, "stop": None}
        wait_s = self.chance.choice([0.001, 0.01, 0.1, 1])
        async with httpx.AsyncClient(base_url=self.client.base_url, verify=False) as own:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    answer = await own.post("/v1/completions", json=asked, timeout=60)
                    return await self._expected(answer.status_code, answer.text)
        return "left"

    async def invalid(self) -> int:
        asked, wanted = self.chance.choice(INVALID)
        content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        answer = await self.client.post("/v1/completions", content=content, headers=headers)
        if answer.status_code not in (wanted, 429):
            self.fault(f"{content[:80]!r}: {answer.status_code}, not {wanted}")
        await asyncio.sleep(0.05)
        return answer.status_code

    async def _expected(self, code: int, text: str) -> int:
        if code == 429:
            await asyncio.sleep(0.3)  # a client that is told to wait, waits
        elif code != 200:
            self.fault(f"{code}: {text}")
        return code

    # --- watching

    async def watching(self) -> None:
        """Memory and files every ten seconds, how fast /health answers, one line a minute."""
        began = time.monotonic()
        for number in itertools.count():
            if self.served.process.poll() is not None:
                self.stops = 0.0
            if not self.on():
                return
            asked = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                await health(self.client)
            self.slowest_health_s = max(self.slowest_health_s, time.monotonic() - asked)
            pid, engine = self.served.process.pid, self.served.engine
            files = open_files(pid).total()
            self.samples.append((rss_bytes(pid), rss_bytes(engine), files))
            if number % 6 == 0:
                front, back, _ = self.samples[-1]
                sys.stdout.write(
                    f"{(time.monotonic() - began) / 60:6.1f} min  front end {front >> 20} MiB, "
                    f"engine {back >> 20} MiB, {files} files, {self.rounds.total()} probes, "
                    f"{self.changed.total()} changed, {self.counts['unexpected']} unexpected\n"
                )
                sys.stdout.flush()
            await asyncio.sleep(SAMPLE_S)


def growth(samples: Sequence[int]) -> float:
    """How much larger the last third is than the middle one, as a share, by their medians.

    The first third is warm-up: allocators, caches of shapes, tokenizers.
    """
    third = len(samples) // 3
    if third == 0:
        return 0.0
    middle = statistics.median(samples[third : 2 * third])
    return statistics.median(samples[-third:]) / middle - 1


async def soak(served: Served, seconds: float, seed: int) -> Soak:
    """Probes alone, then everything at once, then silence."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        run = Soak(client, served, time.monotonic() + seconds, random.Random(seed))
        for name, asked in probes().items():
            run.wanted[name] = await run.probe(name, asked) or ""
        run.idle_files = open_files(served.process.pid)
        async with asyncio.TaskGroup() as group:
            for name, asked in probes().items():
                group.create_task(run.probing(name, asked))
            for _ in range(CLIENTS):
                group.create_task(run.loading())
            group.create_task(run.watching())
        await judge(run, Findings())
    return run


async def judge(run: Soak, see: Findings) -> None:
    """Print what was seen; `run.counts["FAIL"]` holds how much of it is wrong."""
    for kind, count in sorted(run.counts.items()):
        sys.stdout.write(f"      {kind}: {count}\n")
    asked, changed = run.rounds.total(), dict(run.changed)
    least = min(run.rounds.values(), default=0)
    held = f"CHANGED {changed}" if changed else "every bit as when asked alone"
    see(not changed and least > 0, f"{asked} probes of {len(run.wanted)} kinds, each {least} times "
        f"or more: {held}")  # fmt: skip
    pairs = [
        (run.wanted.get(n), run.wanted.get(f"{n}, streamed")) for n in ("seeded", "long prompt")
    ]
    see(all(plain and plain == streamed for plain, streamed in pairs),
        "streamed and plain probes have the same bits")  # fmt: skip
    see(least > 0 and run.counts["plain: 429"] > 0, "the queue was full again and again (429)")
    see(not run.faults, "nothing unexpected" if not run.faults else "\n      ".join(run.faults))
    run.counts["FAIL"] = see.failed
    if (code := run.served.process.poll()) is not None:
        last = run.served.log.strip().splitlines()[-1]
        see(False, f"the server ended under load, exit code {code}: {last}")
        run.counts["FAIL"] = see.failed
        return
    columns = list(zip(*run.samples, strict=True))
    for name, column in zip(("front end", "engine"), columns, strict=False):
        grown = growth(column)
        see(grown < MOST_GROWTH, f"memory of the {name}: {column[0] >> 20} MiB at first, "
            f"{column[-1] >> 20} at last; the last third against the middle one {grown:+.2%}, "
            f"at most {MOST_GROWTH:.0%}")  # fmt: skip
    await until(lambda: _silent(run.client), 60, 0.2)
    see(True, "load over: no request in the engine, by our count and by its own")
    await asyncio.sleep(1)
    more = open_files(run.served.process.pid) - run.idle_files
    words = f"open files of the front end: {more.total()} more than before the load, at most {KEPT}"
    see(more.total() <= KEPT, words if more.total() <= KEPT else f"{words}: {dict(more)}")
    see(
        True,
        f"slowest /health under load: {run.slowest_health_s:.2f} s (not judged: machines differ)",
    )
    for name, body_ in probes().items():
        if await run.probe(name, body_) != run.wanted[name]:
            see(False, f"probe {name} after the load: changed")
    code = await asyncio.to_thread(run.served.stop)
    see(code == 0, f"SIGTERM: exit code {code}")
    bad = [x for x in run.served.log.splitlines() if "Traceback" in x or " error" in x.lower()[:40]]
    see(not bad, "no error in the log" if not bad else f"{len(bad)} errors in the log: {bad[0]}")
    run.counts["FAIL"] = see.failed


async def _silent(client: httpx.AsyncClient) -> bool:
    """Nothing runs or waits, by /health, by our gauge, and by the engine's own gauges."""
    text = (await client.get("/metrics")).text
    gauges = ("samebits_choices_in_engine", "vllm:num_requests_running",
              "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc")  # fmt: skip
    found = [x for x in text.splitlines() if x.startswith(gauges)]
    if len(found) < len(gauges):
        raise RuntimeError(f"gauges are missing: {found}")
    idle = (await health(client))["running"] == 0
    return idle and all(float(line.rsplit(" ", 1)[1]) == 0 for line in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1 / 6)
    parser.add_argument("--seed", type=int, default=1, help="of the load's order")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server"
    )
    args = parser.parse_args()
    settings = SETTINGS | dict(each.lower().split("=", 1) for each in args.set)
    folder = Path(tempfile.mkdtemp(prefix="samebits-soak-"))
    served = Served(folder=folder, **settings, receipts=folder / "receipts.jsonl")
    try:
        took = served.ready()
        sys.stdout.write(
            f"model {MODEL}, {args.hours * 60:.0f} minutes, {CLIENTS} clients + {len(probes())} "
            f"probes, {settings}\nready after {took:.0f} s\n"
        )
        run = asyncio.run(soak(served, args.hours * 3600, args.seed))
    finally:
        served.stop()
    if run.counts["FAIL"]:
        sys.stdout.write(f"log: {served.log_path}\n")
    else:
        shutil.rmtree(served.folder)
    return int(run.counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
