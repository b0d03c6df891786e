"""A program: says whether grammars can be followed, and whether answers ended where theirs allows.

It runs in a process of its own, because a hostile grammar can keep its compiler busy for hours, or
take all memory, and no thread can be told to stop. It imports llguidance and nothing of this
project. The first line of stdin describes the tokenizer, each later one asks; stdout has one line
for each, a JSON text, "" when all is well. Whoever asks too much ends the process: by SIGPROF after
`cpu_s` seconds of processor time (not of the clock: a busy machine refuses nothing that an idle one
takes), by a failed allocation beyond `memory` bytes more than the tokenizer needs.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

MAX_CHARS = 200  # of a compiler's words; they may quote the grammar
NOTHING = "no text can satisfy it"
NOT_ALLOWED = "not allowed"
_TEXTS = re.compile(r'"(?:\\.|[^"\\])*"')
_STEERS = re.compile(r"\btemperature\s*=")


def serialized(kind: str, text: str) -> str:
    """llguidance's form of a grammar (`Sampling.structured`), the same as vLLM hands to it."""
    if kind == "json_object":
        kind, text = "json", '{"type": "object"}'
    if kind == "json":
        return str(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True}))
    return str(grammar_from(kind, text))  # type: ignore[arg-type]


def _short(said: str) -> str:
    text = " ".join(said.partition("\n<state>")[0].split())
    if text.startswith("NoExtensionBias"):  # the parser stands where nothing can follow
        return NOTHING
    return text[:MAX_CHARS]


class Judge:
    """Verdicts by one tokenizer. A verdict is "", or what is wrong in at most `MAX_CHARS`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def _compile(self, kind: str, text: str) -> tuple[str, Any]:
        if kind == "grammar" and _STEERS.search(_TEXTS.sub("", text)):
            return "a rule sets temperature, which is an option of the request", None
        try:
            grammar = serialized(kind, text)
        except (ValueError, TypeError, RecursionError) as fault:
            return _short(str(fault)) or type(fault).__name__, None
        failed, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed or said:  # a warning names something that would be dropped
            return _short("; ".join(said)) or "invalid", None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        return _short(matcher.get_error()), matcher

    def start(self, kind: str, text: str) -> str:
        """Why no answer can follow the grammar."""
        fault, matcher = self._compiled(kind, text)
        if fault:
            return str(fault)
        first = matcher.deep_copy()
        allowed = any(first.compute_logit_bias())
        return _short(first.get_error()) or ("" if allowed else NOTHING)

    def end(self, kind: str, text: str, token_ids: list[int]) -> str:
        """Why an answer of these tokens, without the one that ended it, isn't a whole one."""
        fault, matcher = self._compiled(kind, text)
        if fault:
            return str(fault)
        walk = matcher.deep_copy()
        for count, token_id in enumerate(token_ids):
            if not walk.consume_token(token_id):
                said = walk.get_error()
                strange = "satisfy the grammar" in said or "parser stopped" in said
                return f"token {count}: {NOT_ALLOWED if strange else _short(said)}"
        return "" if walk.is_accepting() else f"it is not complete after {len(token_ids)} tokens"


def _bound(memory: int) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _tokenizer(first: dict[str, Any]) -> tuple[Any, str]:
    """llguidance's reading of the tokenizer, and why it is of no use. It knows few decoders, and
    takes the first of a row for all of them: masks would be made for other texts than are said.
    """
    try:
        read = LLTokenizer(first["tokenizer"], n_vocab=first["n_vocab"], eos_token=first["eos"])
    except Exception as fault:  # of a Rust library
        return None, "its compiler can't read this model's tokenizer: " + _short(str(fault))
    for token_id, text in enumerate(first["spelled"] or ()):
        spelled, taken = text.encode("latin-1"), read.decode_bytes([token_id])
        if spelled != taken and b"\xff" not in spelled:  # its mark; no byte of any text
            return None, (
                f"its compiler misreads this model's tokenizer: token {token_id} is {spelled!r}, "
                f"not {taken!r}"
            )
    return read, ""


def main() -> None:
    """Answer the lines of stdin until it ends."""
    first = json.loads(sys.stdin.buffer.readline())
    read, fault = _tokenizer(first)
    memory, cpu_s = first["memory"], first["cpu_s"]
    sys.stdout.write(json.dumps(fault) + "\n")
    sys.stdout.flush()
    if fault:
        return
    judge = Judge(read)
    del first
    _bound(memory)
    for line in sys.stdin.buffer:
        kind, text, token_ids = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        said = judge.start(kind, text) if token_ids is None else judge.end(kind, text, token_ids)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
