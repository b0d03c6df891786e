"""Batch files: requests in (OpenAI's format, or plain prompts), answers out, a line each;
resumable by what is there.

A line of a file of requests that has no custom_id is told by its number, in error.line, and its
custom_id is null: a name made for it might be another line's.

In:   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {…}}, or a prompt a
line (as it stands,
      or as a JSON string where it has line breaks).
Out:  {"id": …, "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}},
"error": null}
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 64 << 20
URLS = ("/v1/completions", "/v1/chat/completions")


class BadFile(ValueError):
    """An input or output file that can't be used. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Task:
    """One line to answer. `fault` says why it can't be asked; then there is no body. `custom_id`
    None: the line has none, and goes by its number.
    """

    custom_id: str | None
    url: str
    body: Mapping[str, Any]
    num_bytes: int
    line: int = 0
    fault: str | None = None


def read_tasks(path: Path, defaults: Mapping[str, Any]) -> Iterator[Task]:
    """The lines of the input, one at a time. `defaults` are body fields that a line does not
    set.
    """
    with path.open("rb") as file:
        plain: bool | None = None
        number = 0
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            if plain is None:
                plain = not raw.lstrip().startswith(b"{")
            read = _plain if plain else _request
            yield read(raw, number, defaults)


def _plain(raw: bytes, line: int, defaults: Mapping[str, Any]) -> Task:
    name = f"line-{line}"
    try:
        text: Any = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        return Task(name, URLS[0], {}, len(raw), line, "the line is not UTF-8")
    if text.startswith('"'):
        try:
            text = json.loads(text)
        except ValueError:
            pass  # a prompt that begins with a quotation mark
    return Task(name, URLS[0], {**defaults, "prompt": text}, len(raw), line)


def _request(raw: bytes, number: int, defaults: Mapping[str, Any]) -> Task:
    def bad(fault: str, custom_id: str | None = None) -> Task:
        return Task(custom_id, "", {}, len(raw), number, fault)

    try:
        line = json.loads(raw, object_pairs_hook=_pairs)
    except _Twice as fault:
        return bad(f"the key {fault} stands twice")
    except (ValueError, RecursionError):
        return bad("the line is no JSON")
    if not isinstance(line, dict):
        return bad("the line is no JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad("custom_id is required: a text")
    if line.get("method", "POST") != "POST":
        return bad("method: only POST", custom_id)
    if line.get("url") not in URLS:
        return bad(f"url: should be one of {', '.join(URLS)}", custom_id)
    body = line.get("body")
    if not isinstance(body, dict):
        return bad("body is required: an object", custom_id)
    if body.get("stream"):
        return bad("body.stream: an answer in a file is not streamed", custom_id)
    return Task(custom_id, line["url"], {**defaults, **body}, len(raw), number)


class _Twice(Exception):
    """A key that stands twice in one object: which of its values was meant?"""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(repr(key[:100]))
        found[key] = value
    return found


class Output:
    """The output file, held by one process. What it holds already is done; a torn last line is cut
    off.
    """

    def __init__(self, path: Path, fingerprint: str, *, mix: bool = False) -> None:
        """Raises `BadFile` when another process holds it, or it has answers of another
        fingerprint.
        """
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise BadFile(f"{path}: another batch is writing to it") from None
        self._done: set[bytes] = set()
        self.failed = 0
        try:
            end = self._read_back(path, fingerprint, mix)
        except BaseException:
            os.close(self._file)
            raise
        os.ftruncate(self._file, end)
        self.resumed = len(self._done)

    def take(self, task: Task) -> bool:
        """Mark as done. False: it was done before, in this run or in an earlier one."""
        key = _key(task.custom_id, task.line)
        if key in self._done:
            return False
        self._done.add(key)
        return True

    def add(self, task: Task, response: Mapping[str, Any] | None) -> None:
        """One answer, in one write; the task's fault where there is none."""
        error: dict[str, Any] | None = None
        if task.fault is not None:
            error = {"code": "invalid_line", "message": task.fault, "line": task.line}
        line = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": task.custom_id,
            "response": response,
            "error": error,
        }
        self._count(line)
        raw = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        data = raw.encode("utf-8", "backslashreplace") + b"\n"
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, data)
        except OSError:
            os.ftruncate(self._file, before)
            raise
        if written != len(data):
            os.ftruncate(self._file, before)
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        os.close(self._file)

    def _count(self, line: Mapping[str, Any]) -> None:
        response = line.get("response")
        if line.get("error") or not response or response.get("status_code") != 200:
            self.failed += 1

    def _read_back(self, path: Path, fingerprint: str, mix: bool) -> int:
        """Offset behind the last whole line."""
        end = 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = json.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    line = None
                key = _key_of(line) if isinstance(line, dict) else None
                if not isinstance(line, dict) or key is None:
                    if not raw.endswith(b"\n"):
                        return end
                    raise BadFile(f"{path}: is no output of a batch; choose another name")
                end += len(raw)
                found = ((line.get("response") or {}).get("body") or {}).get("system_fingerprint")
                if found and found != fingerprint and not mix:
                    raise BadFile(
                        f"{path}: holds answers of fingerprint {found}, this start has "
                        f"{fingerprint}; choose another file, or --mix to go on all the same"
                    )
                self._done.add(key)
                self._count(line)
        return end


def _key(custom_id: str | None, line: int) -> bytes:
    """What tells one line from another: its custom_id, or its number, which no custom_id can be."""
    if custom_id is None:
        return hashlib.blake2b(b"%d" % line, digest_size=16, salt=b"line").digest()
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _key_of(line: Mapping[str, Any]) -> bytes | None:
    """The key of a line of output; None where it is none of ours."""
    custom_id, error = line.get("custom_id"), line.get("error")
    if isinstance(custom_id, str):
        return _key(custom_id, 0)
    number = error.get("line") if isinstance(error, dict) else None
    return _key(None, number) if custom_id is None and isinstance(number, int) else None
