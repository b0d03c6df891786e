"""Files of many lines: whatever reads receipts or requests reads them as a stream, in memory that
does not grow with the file.

`python -m tests.server.test_many_receipts` reads files of one and of ten million lines, prints
what was measured as a table and exits 1 where memory grew; it takes 12 GB of disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from server.engine import Sampling
from server.fingerprint import short
from server.receiptfile import Reader
from server.receipts import answer_digests, options_of, request_digest

BLOCK = 10_000
SPARE_BYTES = 12 << 20  # what a run may take more than one with a tenth of the lines
TREE = {"schema": "samebits.fingerprint/1"}
FINGERPRINT = short(TREE)
HEADER = {
    "schema": "samebits.log/1",
    "fingerprint": FINGERPRINT,
    "tree": TREE,
}

VERIFY = """
import sys
from server.cli import main
sys.exit(main(["replay", sys.argv[1], "--verify-only", "--restart"]))
"""
RESUME = """
import sys
from pathlib import Path
from server import results
from server.cli import main
path = Path(sys.argv[1]).with_suffix(".results.jsonl")
end = results._line(results.COMPLETE).encode()
import os
if results._is_complete(path):
    os.truncate(path, path.stat().st_size - len(end))  # as if it had been stopped at the very end
sys.exit(main(["replay", sys.argv[1], "--verify-only"]))
"""
READER = """
import sys
from pathlib import Path
from server.receiptfile import Reader
print(sum(not e.status for e in Reader([Path(sys.argv[1])]).entries()))
"""
HOLDER = READER.replace("sum(not e.status for e in ", "len(list(").replace(
    "entries())", "entries()))"
)
DIFF = """
import sys
from server.cli import main
sys.exit(main(["fingerprint", "--diff", sys.argv[1], sys.argv[1]]))
"""


def record(full: bool) -> str:
    """One line of a log, with %d where the number goes: of one token, or digests only."""
    ids, logprobs, text = [7], [-0.5], " a"
    options = options_of(Sampling(1, seed=1))
    receipt = {
        "schema": "samebits.receipt/1",
        "fingerprint": FINGERPRINT,
        "model": "toy",
        "choice": 0,
        "seed": 1,
        "request_sha256": request_digest([1], options),
        **answer_digests(ids, logprobs, text),
        "finish_reason": "length",
        "request_id": "r-NUMBER",
        "created": 1,
    }
    line: dict = {"receipt": receipt}
    if full:
        line["request"] = {"prompt_token_ids": [1], "options": options}
        line["answer"] = {
            "token_ids": ids,
            "logprobs": logprobs,
            "text": text,
            "finish_reason": "length",
        }
    return json.dumps(line, separators=(",", ":")).replace("NUMBER", "%d") + "\n"


def write(path: Path, count: int, line: str, head: str = "") -> Path:
    """`count` lines, each with its number."""
    with path.open("w") as file:
        file.write(head)
        for first in range(0, count, BLOCK):
            file.write("".join([line % i for i in range(first, min(first + BLOCK, count))]))
    return path


def log(path: Path, count: int, full: bool = True) -> Path:
    return write(path, count, record(full), json.dumps(HEADER) + "\n")


# What the kernel tells a parent of its child's peak holds what the parent had at the fork; this is
# the child's own, from its own mouth.
OWN_PEAK = """
import atexit, re
from pathlib import Path
def _peak():
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
atexit.register(_peak)
"""


def run(program: str, path: Path) -> tuple[int, float, int]:
    """Exit code, seconds and peak memory in bytes of a Python program over a file."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", OWN_PEAK + program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    return done.returncode, seconds, int(done.stdout.split()[-1]) << 10


def grew(program: str, folder: Path, few: int, many: int, full: bool = True) -> int:
    """Bytes that a run over `many` lines takes more than one over `few`."""
    peaks = []
    for count in (few, many):
        code, _, peak = run(program, log(folder / "log.jsonl", count, full))
        assert code in (0, 1)
        peaks.append(peak)
    return peaks[1] - peaks[0]


@pytest.mark.parametrize("program", [READER, VERIFY, DIFF], ids=["reader", "verify", "diff"])
def test_memory_is_flat(tmp_path, program):
    assert grew(program, tmp_path, 10_000, 40_000, program == READER) < SPARE_BYTES


def test_a_reader_that_keeps_its_lines_is_caught(tmp_path):
    assert grew(HOLDER, tmp_path, 10_000, 40_000) > 4 * SPARE_BYTES


def test_headers_of_ever_other_starts_are_not_all_kept(tmp_path):
    def heads(count):
        with (tmp_path / "log.jsonl").open("w") as file:
            for number in range(count):
                tree = {"number": number, "much": "x" * 10_000}
                file.write(json.dumps({**HEADER, "fingerprint": short(tree), "tree": tree}) + "\n")
        return tmp_path / "log.jsonl"

    faults = READER.replace("not e.status", "1")
    few, many = run(faults, heads(1_000)), run(faults, heads(10_000))
    assert few[0] == many[0] == 0 and many[2] - few[2] < SPARE_BYTES
    assert not [*Reader([heads(10)]).entries()]  # they are whole headers, with trees to keep


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_million_lines(tmp_path):
    assert measured(tmp_path, 1_000_000, 10_000_000)


OPEN_OUTPUT = """
import sys
from pathlib import Path
from server.batchfile import Output, Task
output = Output(Path(sys.argv[1]), "f")
assert not output.take(Task("id-0", "", {}, 0)) and output.take(Task("another", "", {}, 0))
"""
DONE = '{"id":"b","custom_id":"id-%d","response":{"status_code":200,"body":{}},"error":null}\n'
INDEX_BYTES = 140  # what a batch keeps for each line that is done, at most


def test_a_batch_keeps_little_for_a_line_that_is_done(tmp_path):
    few = run(OPEN_OUTPUT, write(tmp_path / "out.jsonl", 10_000, DONE))
    many = run(OPEN_OUTPUT, write(tmp_path / "out.jsonl", 200_000, DONE))
    assert few[0] == many[0] == 0
    assert (many[2] - few[2]) / 190_000 < INDEX_BYTES


def measured(folder: Path, *counts: int) -> bool:
    """Whether every reader stayed flat from one count to the next; prints what it saw."""
    peaks: dict[str, list[int]] = {}
    say = sys.stdout.write
    say(
        "| digests only | lines | file | seconds | lines/s | peak memory |\n"
        "|---|---|---|---|---|---|\n"
    )
    for count in counts:
        path = log(folder / "many.jsonl", count, full=False)
        size = path.stat().st_size / 1e6
        for name, program in (
            ("replay --verify-only", VERIFY),
            ("fingerprint --diff", DIFF),
            ("reader", READER),
            ("the same, gone on with", RESUME),
        ):
            code, seconds, peak = run(program, path)
            assert code in (0, 1), name
            peaks.setdefault(name, []).append(peak)
            row = (name, f"{count:,}", f"{size:,.0f} MB", f"{seconds:.1f}")
            say(
                "| "
                + " | ".join((*row, f"{count / seconds:,.0f}", f"{peak / 1e6:.0f} MB"))
                + " |\n"
            )
            sys.stdout.flush()
    return all(peak[-1] - peak[0] < SPARE_BYTES for peak in peaks.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not measured(Path(name), *map(int, sys.argv[1:] or ("1000000", "10000000"))))
