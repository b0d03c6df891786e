"""How long /health takes while clients send what is largest, deepest or refused.

    python -m tests.bench.health [seconds]

Starts `samebits serve` on the tiny model of `tests.bench.frontend`, attacks it from another process
and asks /health all the time. Prints median, 99th percentile and maximum in milliseconds per
attack, and how the attackers were answered.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.bench.frontend import start, tiny_model
from tests.bench.start import free_port

MIB = 1 << 20
CLIENTS = 8
COMPLETIONS = "/v1/completions"
PATHS = {b'{"prompt"': "/tokenize", b'{"tokens"': "/detokenize"}  # by how a body begins


def bodies() -> dict[str, list[bytes]]:
    """The attacks: bodies near and over the limit of 4 MiB, and cheap ones that are refused.
    `PATHS` says which go where.
    """
    ids = b"[" + b"1," * (2 * MIB - 1000) + b"1]"
    lists = b"[" + b",".join([b"[" + b"777," * 999 + b"1]"] * 256) + b"]"
    return {
        "idle": [],
        "4 MiB of token ids": [b'{"model":"m","prompt":' + ids + b"}"],
        "ids, the last is NaN": [b'{"model":"m","prompt":' + ids[:-1] + b",NaN]}"],
        "256 x 1,000 ids": [b'{"model":"m","max_tokens":0,"echo":true,"n":9,"prompt":%s}' % lists],
        "4 MiB of texts": [b'{"model":"m","prompt":[' + b'"a",' * (MIB - 100) + b'"a"]}'],
        "4 MiB to tokenize": [json.dumps({"prompt": "word " * 800_000}).encode()],
        "ids to text": [b'{"tokens":' + ids + b"}"],
        "4 MiB of text": [json.dumps({"model": "m", "prompt": "word " * 800_000}).encode()],
        "objects in objects": [b'{"model":"m","logit_bias":' + b'{"a":' * 400_000],
        "a million keys": [
            b'{"model":"m","logit_bias":{'
            + b",".join(b'"%d":1' % i for i in range(300_000))
            + b"}}"
        ],
        "9 MiB": [b'{"model":"m","prompt":"' + b"a" * 9 * MIB + b'"}'],
        "refused fields": [b'{"model":"m","prompt":"a","n":0}'],
        "answers": [b'{"model":"m","prompt":"a","max_tokens":64,"n":4,"ignore_eos":true}'],
    }


def attack(port: int, sent: list[bytes], seconds: float, out: Any) -> None:
    """Some clients send the bodies over and over; puts the count of each status into `out`."""
    statuses: collections.Counter[str] = collections.Counter()
    ends = time.monotonic() + seconds

    def client() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while time.monotonic() < ends:
                for body in sent:
                    try:
                        head = {"content-type": "application/json"}
                        path = next(
                            (p for k, p in PATHS.items() if body.startswith(k)), COMPLETIONS
                        )
                        answer = http.post(path, content=body, headers=head)
                        statuses[str(answer.status_code)] += 1
                    except httpx.TransportError as fault:
                        statuses[type(fault).__name__] += 1

    threads = [threading.Thread(target=client) for _ in range(CLIENTS if sent else 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put(dict(statuses))


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        model = str(tiny_model(Path(folder) / "model"))
        samebits = str(Path(sys.executable).parent / "samebits")
        server = start(
            [samebits, "serve", "--model", model, "--log-level", "warning"],
            port,
            Path(folder) / "log",
        )
        try:
            for name, sent in bodies().items():
                measure(name, port, sent, seconds)
        finally:
            server.terminate()
            server.wait(60)


def measure(name: str, port: int, sent: list[bytes], seconds: float) -> None:
    """One attack, and /health meanwhile."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    attacker = context.Process(target=attack, args=(port, sent, seconds, out))
    attacker.start()
    took = []
    ends = time.monotonic() + seconds + 2
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while time.monotonic() < ends:
            begun = time.perf_counter()
            http.get("/health").raise_for_status()
            took.append(1000 * (time.perf_counter() - begun))
            time.sleep(0.01)
    statuses = out.get()
    attacker.join()
    took.sort()
    sys.stdout.write(
        f"{name:20} median {statistics.median(took):6.1f}  p99 {took[int(0.99 * len(took))]:6.1f}  "
        f"max {took[-1]:6.1f} ms of {len(took)}; {statuses}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 6)
