"""One lease of a GPU, used well: many measurements in the order of their worth, each written down
as soon as it is known.

    python -m tests.bench.gpu_session OUT_DIR [--seconds 585] [--stages STAGE ...]

Engines of several modes and models start together (compiling is work for the host), prove their
bits, and then take turns with the clock, so that a ratio is of neighbours in time. OUT_DIR gets
report.json, and the logs. Whatever the deadline cuts off is missing there, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

STAGES = ("tests", "first", "second", "kernels", "third")
# name: shape, mode, options. GiB of KV cache hold 128 × 640 tokens.
FIRST = {
    "1.7b ours": ("1.7b", "ours", "--kv 9.5"),
    "1.7b stock": ("1.7b", "stock", "--kv 9.5"),
    "1.7b vllm": ("1.7b", "vllm", "--kv 9.5"),
    "8b ours": ("8b", "ours", "--kv 12"),
    "8b stock": ("8b", "stock", "--kv 12"),
}
SECOND = {
    "30b-a3b-16 ours": ("30b-a3b-16", "ours", "--kv 3"),
    "30b-a3b-16 stock": ("30b-a3b-16", "stock", "--kv 3"),
    "30b-a3b-16 vllm": ("30b-a3b-16", "vllm", "--kv 3"),
    # after a restart, with other chunks, and with too few blocks for the batch: preemption
    "1.7b ours again": ("1.7b", "ours", "--kv 2 --blocks 1100 --batched 1024"),
}
THIRD = {"8b vllm": ("8b", "vllm", "--kv 12"), "8b stock": FIRST["8b stock"]}


class Lease:
    """The deadline, the report and what goes into it."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.begin, self.until = out, time.time(), time.time() + seconds
        self.work = Path(os.environ.get("GPU_SESSION_WORK", "/tmp/gpu-session"))
        self.work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"engines": {}, "stages": {}}

    def left(self, most: float = 1e9) -> float:
        return max(0.0, min(most, self.until - time.time()))

    def say(self, *what: Any) -> None:
        print(f"[{time.time() - self.begin:5.0f}]", *what, flush=True)

    def keep(self) -> None:
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1, default=str))


class Engine:
    """A gpu_engine process: commands in, answers out."""

    def __init__(self, lease: Lease, name: str, spec: tuple[str, str, str], extra: str) -> None:
        self.lease, self.name, self.alive = lease, name, True
        slug = name.replace(" ", "_")
        self.file = lease.work / f"{slug}.json"
        self.log = lease.out / f"{slug}.log" if extra else lease.work / f"{slug}.log"
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.gpu_engine", spec[0], spec[1], str(self.file),
                 *spec[2].split(), *extra.split()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@ "):
                self.answers.put(json.loads(line[3:]))
            else:
                with self.log.open("a") as log:
                    log.write(line)
        self.answers.put(None)

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; `fault` in it when there is none in time or the process is gone."""
        if not self.alive:
            return {"fault": "gone"}
        try:
            found = self.answers.get(timeout=max(self.lease.left(seconds), 0.01))
        except queue.Empty:
            found = {"fault": f"no answer in {seconds:.0f} s"}
            self.stop()
        if found is None:
            found = {"fault": f"ended with {self.process.wait()}"}
            self.alive = False
        with contextlib.suppress(OSError, ValueError):
            self.lease.report["engines"][self.name] = json.loads(self.file.read_text())
        if "fault" in found:
            self.lease.report["engines"].setdefault(self.name, {})["fault"] = found
            self.lease.report["engines"][self.name]["log"] = self.log.read_text()[-3000:]
            self.lease.say(self.name, found)
        self.lease.keep()
        return found

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        self.send(command)
        return self.answer(seconds)

    def stop(self) -> None:
        self.alive = False
        self.process.kill()


def start(
    lease: Lease, specs: dict[str, tuple[str, str, str]], extra: str = ""
) -> dict[str, Engine]:
    """Processes that import everything and wait."""
    return {name: Engine(lease, name, spec, extra) for name, spec in specs.items()}


def prepare(lease: Lease, engines: dict[str, Engine]) -> None:
    """Start all at once; each proves its ops and its bits as soon as it is up."""

    def one(engine: Engine) -> None:
        engine.answer(120)  # import
        for command, seconds in (("start", 330), ("check", 120), ("bits", 200)):
            found = engine.ask(command, seconds)
            if "fault" in found and command == "start":
                engine.stop()
                return
            lease.say(engine.name, found)
        report = lease.report["engines"].get(engine.name, {})
        lease.say(engine.name, report.get("runner"), report.get("bits"))

    threads = [threading.Thread(target=one, args=(e,), daemon=True) for e in engines.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(lease.left())


def clock(lease: Lease, engines: dict[str, Engine], laps: int) -> None:
    """Laps of each shape's engines in turn, then where one stream's time goes."""
    shapes: dict[str, list[Engine]] = {}
    for name, engine in engines.items():
        if engine.alive and "again" not in name:
            shapes.setdefault(name.split()[0], []).append(engine)
    for shape, group in shapes.items():
        for lap in range(laps):  # the first warms up
            for engine in group if lap % 2 else group[::-1]:
                engine.ask("lap", 60)
            if lease.left() < 15:
                return
        for engine in group:
            report = lease.report["engines"].get(engine.name, {})
            lease.say(engine.name, *[{k: round(v, 2) for k, v in x.items()}
                                     for x in report.get("laps", [])[1:]])  # fmt: skip
        lease.say(shape, "timed")
    for group in shapes.values():
        for engine in group:
            if "vllm" not in engine.name and lease.left() > 30:
                lease.say(engine.name, engine.ask("profile", 60))


def command(lease: Lease, name: str, line: list[str], seconds: float) -> None:
    """Any other program, its output kept."""
    begin = time.time()
    with (lease.out / f"{name}.txt").open("w") as file:
        try:
            code: Any = subprocess.run(
                [sys.executable, *line], stdout=file, stderr=subprocess.STDOUT,
                timeout=max(lease.left(seconds), 1),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "cut off"
    lease.report["stages"][name] = {"code": code, "s": time.time() - begin, "line": line}
    lease.keep()
    lease.say(name, "ended with", code, f"after {time.time() - begin:.0f} s")
    print((lease.out / f"{name}.txt").read_text()[-1500:], flush=True)


def wave(
    lease: Lease, engines: dict[str, Engine], laps: int, tests: list[threading.Thread]
) -> None:
    """One set of engines, from start to end; nothing else runs while the clock does."""
    prepare(lease, engines)
    for thread in tests:
        thread.join(lease.left())
    clock(lease, engines, laps)
    close(engines)


def close(engines: dict[str, Engine]) -> None:
    """End every process, so that its memory is free."""
    for engine in engines.values():
        engine.stop()
        engine.process.wait()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--seconds", type=float, default=585)
    p.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    p.add_argument("--engines", nargs="*", default=[], help="these instead of all")
    p.add_argument("--laps", type=int, default=5)
    p.add_argument("--tests", default="tests/gpu", help="what the stage tests runs")
    p.add_argument("--shape", default="", help="instead of every engine's own shape (rehearsal)")
    p.add_argument("--engine-options", default="", help="more for every engine (rehearsal)")
    args = p.parse_args()
    lease = Lease(args.out, args.seconds)
    waves: dict[str, dict[str, Engine]] = {}
    for stage, specs in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        if stage in args.stages:
            chosen = {n: (args.shape or s[0], s[1], s[2]) for n, s in specs.items()
                      if not args.engines or n in args.engines}  # fmt: skip
            waves[stage] = start(lease, chosen, args.engine_options)
    threads = []
    try:
        for stage in args.stages:
            lease.say("stage", stage)
            if stage == "tests":
                line = ["-m", "pytest", "-q", "--maxfail=5", "-p", "no:cacheprovider",
                        args.tests]  # fmt: skip
                tests = threading.Thread(
                    target=command, args=(lease, "tests", line, 360), daemon=True
                )
                tests.start()
                threads.append(tests)
            elif stage in waves:
                wave(lease, waves[stage], args.laps, threads)
            else:
                for thread in threads:
                    thread.join(lease.left())
                command(lease, "draw", ["-m", "tests.bench.draw", "--device", "cuda", "--repeat",
                                        "15"], 90)  # fmt: skip
                kernels = str(args.out / "kernels.json")
                command(lease, "kernels", ["-m", "tests.bench.gpu_kernels", kernels, "ceilings",
                                           "products", "attentions", "experts"], 240)  # fmt: skip
        for thread in threads:
            thread.join(lease.left())
    finally:
        for engines in waves.values():
            close(engines)
        lease.keep()
        lease.say("end")


if __name__ == "__main__":
    main()
