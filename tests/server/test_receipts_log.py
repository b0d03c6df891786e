"""The receipts log: whole lines or none, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

from server import receiptlog
from server.engine import Prompt, Sampling
from server.minting import Minter, ReceiptLost
from server.receiptfile import Reader, shuffled
from server.receiptlog import LogFailed, ReceiptLog
from tests.server.toy import ToyEngine


def minter_with(tmp_path, engine, **options):
    header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
    keep = {key: options.pop(key) for key in ("full", "refuse") if key in options}
    log = ReceiptLog(tmp_path / "log.jsonl", header, **{"max_bytes": 1 << 30, **options})
    return Minter(engine, log=log, **keep)


async def ask(engine, minter, count=1, tokens=8, wanted=False):
    for seed in range(count):
        source = minter.over(engine, wanted)
        async for _ in source.generate(
            Prompt((1, 2), "ab"), Sampling(tokens, seed=seed), request_id="r"
        ):
            pass


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_logged_whatever_the_header_says(tmp_path):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine)
    await ask(engine, minter, 3)
    head, *records = lines(tmp_path / "log.jsonl")
    assert head["schema"] == "samebits.log/1" and head["fingerprint"] == engine.fingerprint
    assert len(records) == 3
    assert records[0]["request"]["prompt"] == "ab"
    assert [e.status for e in Reader([tmp_path / "log.jsonl"]).entries()] == [""] * 3


async def test_digests_only(tmp_path):
    engine = ToyEngine()
    await ask(engine, minter_with(tmp_path, engine, full=False))
    assert set(lines(tmp_path / "log.jsonl")[1]) == {"receipt", "line_sha256"}


async def test_a_torn_tail_spoils_one_line_only(tmp_path):
    engine = ToyEngine()
    path = tmp_path / "log.jsonl"
    await ask(engine, minter_with(tmp_path, engine), 2)
    os.truncate(path, path.stat().st_size - 9)
    await ask(engine, minter_with(tmp_path, engine), 2)
    statuses = [e.status for e in Reader([path]).entries()]
    assert statuses == ["", "unreadable", "", ""]


async def test_rotation_keeps_everything(tmp_path):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, max_bytes=4096)
    await ask(engine, minter, 60)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert sum(1 for _ in Reader(files).entries()) == 60
    assert all(lines(path)[0]["schema"] == "samebits.log/1" for path in files)


async def test_a_moved_log_is_made_anew(tmp_path):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine)
    await ask(engine, minter, 1)
    (tmp_path / "log.jsonl").rename(tmp_path / "old.jsonl")
    await ask(engine, minter, 1)
    assert len(lines(tmp_path / "log.jsonl")) == 2


@pytest.fixture
def no_room():
    """`with no_room(size)`: files of this process can't grow beyond `size`: a full disk, without
    one. Signals off, so that write() fails. Only inside the block, as the test runner writes files
    too.
    """
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    @contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield limit
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("spare", [0, 1, 100])
async def test_disk_full_refuses_and_recovers(tmp_path, no_room, spare):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, refuse=True)
    await ask(engine, minter)
    path = tmp_path / "log.jsonl"
    size = path.stat().st_size
    # spare > 0: the kernel takes a part of the line, then no more
    with no_room(size + spare), pytest.raises(ReceiptLost, match="receipts log"):
        await ask(engine, minter)
    assert path.stat().st_size == size
    assert minter.log.failed
    await ask(engine, minter)
    assert [e.status for e in Reader([path]).entries()] == ["", ""]


async def test_disk_full_serves_if_told_so(tmp_path, no_room):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, refuse=False)
    path = tmp_path / "log.jsonl"
    with no_room(path.stat().st_size):
        await ask(engine, minter, 3)
    assert minter.lost == 3
    await ask(engine, minter, 1)
    assert [e.status for e in Reader([path]).entries()] == [""]


async def test_known_lack_of_room_refuses_before_work(tmp_path, no_room, monkeypatch):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, refuse=True)
    with no_room((tmp_path / "log.jsonl").stat().st_size), pytest.raises(ReceiptLost):
        await ask(engine, minter)
    monkeypatch.setattr(receiptlog, "FREE_BYTES", 1 << 62)
    asked = engine.asked
    with pytest.raises(ReceiptLost):
        await ask(engine, minter)
    assert engine.asked == asked


async def test_no_headless_file_after_a_full_disk_at_rotation(tmp_path, no_room):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, max_bytes=4096)
    while (tmp_path / "log.jsonl").stat().st_size < 4096:
        await ask(engine, minter)
    with no_room(10), pytest.raises(ReceiptLost):
        await ask(engine, minter)
    await ask(engine, minter)
    assert lines(tmp_path / "log.jsonl")[0]["schema"] == "samebits.log/1"


def test_an_unwritable_place_stops_the_start(tmp_path):
    with pytest.raises(OSError):
        ReceiptLog(tmp_path / "absent" / "log.jsonl", {}, max_bytes=1 << 20)


def test_two_processes_and_a_kill_never_mix_lines(tmp_path):
    """Three writers on one file, one of them killed: every line is whole."""
    script = textwrap.dedent(
        """
        import sys
        from server.receiptlog import ReceiptLog
        log = ReceiptLog(sys.argv[1], {"fingerprint": "f", "tree": {}}, max_bytes=1 << 30)
        i = 0
        while i < int(sys.argv[2]) or int(sys.argv[2]) < 0:
            log.append({"who": sys.argv[2], "i": i, "fill": "x" * (i % 977)})
            i += 1
        """
    )
    path = tmp_path / "log.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), count])
        for count in ("2000", "1999", "-1")
    ]
    assert [w.wait() for w in writers[:2]] == [0, 0]
    writers[2].kill()
    writers[2].wait()
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        found.append(json.loads(line))
    for count in (2000, 1999):
        assert [f["i"] for f in found if f.get("who") == str(count)] == list(range(count))


def test_two_processes_rotate_and_lose_nothing(tmp_path):
    """Both find the file full at once: whoever is second must not rename the first one's new file,
    nor give the old one a second name.
    """
    script = textwrap.dedent(
        """
        import sys
        from server.receiptlog import ReceiptLog
        log = ReceiptLog(sys.argv[1], {"fingerprint": "f", "tree": {}}, max_bytes=4096)
        for i in range(1500):
            log.append({"who": sys.argv[2], "i": i, "fill": "x" * 300})
        """
    )
    path = tmp_path / "log.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "abcd"]
    assert [w.wait() for w in writers] == [0] * 4
    files = list(tmp_path.iterdir())
    assert len(files) > 100 and len({f.stat().st_ino for f in files}) == len(files)
    found = [(x["who"], x["i"]) for f in files for x in lines(f) if "who" in x]
    assert len(found) == len(set(found)) == 4 * 1500


async def test_rotation_that_can_not_be_done_loses_nothing(tmp_path, monkeypatch, caplog):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, max_bytes=4096)

    def no(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", no)
    await ask(engine, minter, 30)
    assert [e.status for e in Reader([tmp_path / "log.jsonl"]).entries()] == [""] * 30
    assert len(list(tmp_path.iterdir())) == 1 and caplog.text.count("can't be rotated") == 1


async def test_a_tail_torn_by_another_process_is_closed_by_the_next_line(tmp_path):
    """A kill within a large write leaves a part of it: whoever shares the file closes it."""
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine)
    await ask(engine, minter)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"receipt":{"schema":"sameb')
    await ask(engine, minter, 2)
    statuses = [e.status for e in Reader([tmp_path / "log.jsonl"]).entries()]
    assert statuses == ["", "unreadable", "", ""]


async def test_fsync_runs(tmp_path, monkeypatch):
    engine = ToyEngine()
    minter = minter_with(tmp_path, engine, fsync=True)
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(fd))
    await ask(engine, minter, 2)
    assert len(calls) == 2


def test_reading_ten_thousand_lines_holds_few(tmp_path, monkeypatch):
    """Memory is bounded by the window, and the order is another one."""
    monkeypatch.setattr("server.receiptfile.WINDOW_LINES", 100)
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"receipt": {i}}}\n' for i in range(10_000)))
    reader = Reader([path])
    taken = 0
    furthest = 0
    order = []

    def counted():
        nonlocal taken
        for entry in reader.entries():
            taken += 1
            yield entry

    for given, entry in enumerate(shuffled(counted(), random.Random(1)), 1):
        furthest = max(furthest, taken - given)
        order.append(entry.line)
    assert furthest <= 100
    assert order != sorted(order) and sorted(order) == list(range(1, 10_001))


def test_whatever_a_line_holds(tmp_path):
    path = tmp_path / "odd.jsonl"
    odd = [
        b"\n",
        b"[]\n",
        b"{\n",
        b"\xff\xfe\n",
        b"null\n",
        b'{"receipt": 1}\n',
        b"{}\n",
        b"[" * 9999 + b"\n",
    ]
    path.write_bytes(b"".join(odd))
    statuses = [e.status for e in Reader([path]).entries()]
    assert statuses == ["unreadable"] * 5 + ["edited"] + ["unreadable"]
    assert dataclasses.asdict(next(Reader([path]).entries()))["line"] == 2


def test_log_failed_names_the_file(tmp_path):
    log = ReceiptLog(tmp_path / "log.jsonl", {}, max_bytes=1 << 20)
    log.close()
    (tmp_path / "log.jsonl").unlink()
    tmp_path.chmod(0o700)
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(LogFailed, match=r"log\.jsonl"):
        log.append({})
