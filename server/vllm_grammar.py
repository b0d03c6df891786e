"""Grammars of structured answers, tried before the engine sees them and checked after.

vLLM compiles a grammar in the engine, beside the steps: one that takes minutes holds up every other
structured answer, and one that the compiler fails on ends the engine. And when llguidance reaches a
limit of its own half-way, vLLM lets the answer end there, as if it were whole. So the same compiler
has its say here first, and last, within limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from server.engine import Output
from server.errors import EngineDead, EngineFailed, InvalidRequest, Overloaded
from server.vllm_text import TokenText

MAX_KNOWN = 4096
RETRY_S = 5
WAIT_S = 30.0  # behind other grammars; each may take `max_grammar_s`
MEMORY_BYTES = 1 << 30  # for one compiler, beside its tokenizer
NOT_ALLOWED = "not allowed"  # the word of `server/grammar_judge.py`
FAILED = "its compiler ran out of memory, or failed"
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by somebody else; a question is no cause of these
_PROGRAM = Path(__file__).with_name("grammar_judge.py")


class Grammars:
    """Verdicts on grammars and on finished answers, by the backend that the engine uses.

    Each of the two has a process of its own (`server/grammar_judge.py`), started at the first
    question, so that new grammars don't hold up answers that are done.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, cpu_s: float) -> None:
        self._tokenizer, self._vocab_size, self._cpu_s = tokenizer, vocab_size, cpu_s
        self._known: dict[bytes, str] = {}
        self._starts = _Process(self._greeting, cpu_s)
        self._ends = _Process(self._greeting, cpu_s)

    async def fault(self, kind: str, text: str) -> str:
        """Why the engine can't follow this grammar; "" when it can."""
        key = hashlib.sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
        found = self._known.get(key)
        if found is None:
            found = await self._starts.ask(kind, text, None)
            if found == FAILED:  # perhaps by another's fault: asked again the next time
                return found
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return found

    async def unfinished(self, kind: str, text: str, token_ids: Sequence[int]) -> str:
        """Why an answer of these tokens isn't a whole one; "" when it is."""
        return await self._ends.ask(kind, text, list(token_ids))

    async def check_end(self, wanted: tuple[str, str], last: Output, said: list[int]) -> None:
        """A structured answer that ended by itself must be a whole one: vLLM also ends it where
        the grammar's parser reaches a limit. Raises `InvalidRequest`.
        """
        by_itself = last.finish_reason == "stop" and last.stop_reason is None
        if not by_itself and last.finish_reason != "error":
            return
        ended = by_itself and said[-1:] == [self._tokenizer.eos_token_id]
        fault = await self.unfinished(*wanted, said[:-1] if ended else said)
        if fault.endswith(NOT_ALLOWED) and not by_itself:
            return  # other options of the request forbade what the grammar allows
        if fault:
            raise InvalidRequest(
                f"structured_outputs: the answer broke off within its grammar: {fault}",
                param="structured_outputs",
            )

    async def close(self) -> None:
        await self._starts.close()
        await self._ends.close()

    def _greeting(self, compare: bool) -> bytes | None:
        """The tokenizer, for a process that has none; None when llguidance can't read it.
        `compare`: with what each token is, for the process to compare.
        """
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return None
        fast = copy(fast)
        fast.no_padding()
        fast.no_truncation()
        spelled = None
        if compare:
            text = TokenText(self._tokenizer)
            spelled = [text.raw(i).decode("latin-1") for i in range(len(self._tokenizer))]
        greeting = {
            "tokenizer": fast.to_str(),
            "n_vocab": max(self._vocab_size, len(self._tokenizer)),
            "eos": self._tokenizer.eos_token_id,
            "spelled": spelled,
            "cpu_s": self._cpu_s,
            "memory": MEMORY_BYTES,
        }
        return json.dumps(greeting).encode()


class _Process:
    """One judge, replaced when a grammar was its end. One question at a time."""

    def __init__(self, greeting: Callable[[bool], bytes | None], cpu_s: float) -> None:
        self._greeting, self._cpu_s = greeting, cpu_s
        self._running: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._asked: asyncio.Task[str] | None = None
        self._compared, self._unreadable = False, ""
        self._closed = False

    async def ask(self, *question: Any) -> str:
        """The verdict. Who leaves before it is their turn asks nothing; who leaves later, leaves
        the next answer to the next one. Raises `Overloaded` after `WAIT_S`.
        """
        try:
            await asyncio.wait_for(self._turn.acquire(), WAIT_S)
        except TimeoutError:
            raise Overloaded(
                f"structured_outputs: other grammars took {WAIT_S:g} s to compile; ask again",
                param="structured_outputs",
                retry_after_s=RETRY_S,
            ) from None
        self._asked = asyncio.ensure_future(self._ask(json.dumps(question).encode()))
        self._asked.add_done_callback(self._answered)
        return await asyncio.shield(self._asked)

    def _answered(self, asked: asyncio.Task[str]) -> None:
        self._turn.release()
        if not asked.cancelled():
            asked.exception()  # who asked may have left

    async def _ask(self, question: bytes) -> str:
        for last in (False, True):
            if self._closed:
                raise EngineDead("the engine is closed")
            if self._unreadable:
                return self._unreadable
            ready = True
            if self._running is None or self._running.returncode is not None:
                ready = await self._start()
                if self._unreadable:
                    return self._unreadable
            said = await self._exchange(question) if ready else None
            if said is not None:
                return said
            assert self._running is not None
            ended = await self._running.wait()
            if ended == -signal.SIGPROF:
                return f"it takes more than {self._cpu_s:g} s to compile"
            if last or ended not in KILLED:
                break
        if not ready:
            raise EngineFailed("the process that compiles grammars does not start")
        return FAILED

    async def _start(self) -> bool:
        """A new process: whether it lives. Finds out why none can judge."""
        greeting = await asyncio.to_thread(self._greeting, not self._compared)
        if greeting is None:
            self._unreadable = "this model's tokenizer is not a fast one, which grammars need"
            return False
        self._running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_PROGRAM)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which drains
        )
        said = await self._exchange(greeting)
        if said is None:
            return False
        self._compared, self._unreadable = True, said
        return True

    async def _exchange(self, sent: bytes) -> str | None:
        """One line there, one back; None when the process has ended."""
        assert self._running is not None
        stdin, stdout = self._running.stdin, self._running.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(sent + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        except ConnectionError:
            return None
        return str(json.loads(line)) if line.endswith(b"\n") else None

    async def close(self) -> None:
        self._closed = True
        if self._asked is not None:
            self._asked.cancel()
        if self._running is not None and self._running.returncode is None:
            self._running.kill()
            await self._running.wait()
