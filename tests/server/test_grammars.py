"""Verdicts on grammars and on finished answers, by the real compiler in its own process.

The tokenizer is a toy of 256 bytes and an end; `tests/engine/test_http.py` asks the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.errors import EngineDead, Overloaded
from server.tools import ToolPlan
from server.vllm_grammar import FAILED, Grammars

END = 256
SLOW = json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b"} for i in range(30)]})
# Every part of it is cheap, and no part can be told apart before the whole is built.
HUGE = "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 40))


class Toy:
    """What a fast tokenizer of Transformers shows of itself."""

    eos_token_id = END
    all_special_ids = (END,)
    added_tokens_decoder = {END: "<end>"}

    def __init__(self) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.backend_tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend_tokenizer.decoder = decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens([AddedToken("<end>", special=True)])

    def __len__(self) -> int:
        return END + 1

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)  # type: ignore[no-any-return]

    def decode(self, token_ids: list[int]) -> str:
        return str(self.backend_tokenizer.decode(token_ids))

    def ids(self, text: str) -> list[int]:
        return list(self.backend_tokenizer.encode(text).ids)


TOY = Toy()


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(TOY, len(TOY), 1.0)
    yield made
    await made.close()


def schema(**parts: Any) -> tuple[str, str]:
    return "json", json.dumps(parts)


GOOD = [
    schema(type="object", properties={"a": {"type": "integer"}}, required=["a"]),
    schema(oneOf=[{"type": "integer"}, {"type": "string"}]),
    schema(allOf=[{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]),
    schema(type="integer", multipleOf=3),
    schema(title="T", description="d", default=1, examples=[1], deprecated=True, type="integer"),
    ("json_object", "{}"),
    ("regex", r"\d{3}-\d{2}"),
    ("choice", json.dumps(["red", 'a "quoted" one', "two\nlines", "nul\0", "😀"])),
    ("grammar", 'root ::= "a" root | "b"'),
    ("grammar", 'start: "temperature=1" /[0-9]+/'),
]


@pytest.mark.parametrize("wanted", GOOD, ids=str)
async def test_good_ones(grammars: Grammars, wanted: tuple[str, str]) -> None:
    assert await grammars.fault(*wanted) == ""


BAD = [
    # What XGrammar leaves out of the grammar without a word.
    (schema(**{"not": {"type": "string"}}), "not"),
    (schema(**{"if": {"type": "string"}, "then": {"minLength": 2}}), "if"),
    (schema(type="object", dependentRequired={"a": ["b"]}), "dependentRequired"),
    (schema(oneOf=[{"type": "integer"}, {"type": "number"}]), "oneOf"),
    (schema(type="array", uniqueItems=True), "uniqueItems"),
    (schema(type="array", contains={"type": "integer"}), "contains"),
    (schema(type="object", propertyNames={"pattern": "^a"}), "propertyNames"),
    (schema(type="string", format="nonsense"), "nonsense"),
    (schema(**{"x-guidance": {"lenient": True}, "not": {"type": "string"}}), "not"),
    # What no text satisfies.
    (schema(enum=[]), "Unsatisfiable"),
    (schema(type="integer", minimum=5, maximum=3), "minimum"),
    (schema(**{"$ref": "#"}), "no text"),
    (("grammar", "root ::= root"), "no text"),
    (("grammar", 'start: start "a"'), "no text"),
    # What is none.
    (("regex", "(["), "regex"),
    (("regex", "(?<=a)b"), "look-around"),
    (("regex", "a\ud800"), "surrogates"),
    (("grammar", "root := ?"), ""),
    (("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "nested"),
    (("grammar", "start: x\nx[temperature=0.5]: /a+/"), "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "named"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_ones(grammars: Grammars, wanted: tuple[str, str], named: str) -> None:
    said = await grammars.fault(*wanted)
    assert said and named in said
    assert len(said) <= 200


async def test_one_that_takes_for_ever(grammars: Grammars) -> None:
    """Only its own request waits for the limit; the next is judged by a new process."""
    began = time.monotonic()
    slow = asyncio.ensure_future(grammars.fault("json", SLOW))
    await asyncio.sleep(0.3)
    assert await grammars.unfinished("regex", "ab", TOY.ids("ab")) == ""
    assert not slow.done()
    assert "more than 1 s" in await slow
    assert time.monotonic() - began > 0.9
    assert await grammars.fault("regex", "ab") == ""
    assert "more than 1 s" in await grammars.fault("json", SLOW)  # and is known from then on


async def test_a_queue_of_such(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits too long behind them is told to come again, and known grammars don't wait."""
    monkeypatch.setattr("server.vllm_grammar.WAIT_S", 0.3)
    assert await grammars.fault("regex", "known") == ""
    slow = asyncio.ensure_future(grammars.fault("json", SLOW))
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded) as told:
        await grammars.fault("regex", "new")
    assert told.value.retry_after_s
    assert await grammars.fault("regex", "known") == ""
    assert "more than 1 s" in await slow
    assert await grammars.fault("regex", "new") == ""


async def test_one_that_takes_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.vllm_grammar.MEMORY_BYTES", 64 << 20)
    small = Grammars(TOY, len(TOY), 600.0)
    try:
        assert await small.fault("grammar", HUGE) == FAILED
        assert await small.fault("regex", "ab") == ""
    finally:
        await small.close()


async def test_a_process_that_was_killed(grammars: Grammars) -> None:
    assert await grammars.fault("regex", "a") == ""
    running = grammars._starts._running
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    await running.wait()
    assert await grammars.fault("regex", "b") == ""


async def test_leaving_before_the_verdict(grammars: Grammars) -> None:
    """The answer to one who left must not become the answer to the next."""
    leaving = asyncio.ensure_future(grammars.fault("regex", "(["))
    await asyncio.sleep(0)
    leaving.cancel()
    found = await asyncio.gather(*(grammars.fault("regex", "a" * (i + 1)) for i in range(5)))
    assert found == [""] * 5
    assert await grammars.fault("regex", "([") != ""


async def test_who_leaves_before_their_turn_asks_nothing(grammars: Grammars) -> None:
    """Twenty that take a second each, whose clients have gone, hold up nobody for twenty."""
    slow = [
        asyncio.ensure_future(grammars.fault("json", SLOW.replace("b", f"b{i}"))) for i in range(20)
    ]
    await asyncio.sleep(0.3)
    for leaving in slow:
        leaving.cancel()
    began = time.process_time()
    assert await asyncio.wait_for(grammars.fault("regex", "ab"), 15) == ""
    assert time.process_time() - began < 5


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("question", ["start", "end"])
async def test_killed_while_it_works(
    grammars: Grammars, question: str, sign: signal.Signals
) -> None:
    """By somebody else, such as a kernel short of memory: the question is not to blame."""
    judge = grammars._starts if question == "start" else grammars._ends
    assert await judge.ask("regex", "a", None if question == "start" else TOY.ids("a")) == ""
    first = judge._running
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(
        grammars.fault("regex", "b")
        if question == "start"
        else grammars.unfinished("regex", "b+", TOY.ids("bb"))
    )
    await asyncio.sleep(0.1)
    assert not asked.done()
    os.kill(first.pid, sign)
    os.kill(first.pid, signal.SIGCONT)
    assert await asked == ""
    assert judge._running is not first


async def test_killed_while_it_starts(grammars: Grammars) -> None:
    asked = asyncio.ensure_future(grammars.fault("regex", "a"))
    while grammars._starts._running is None:
        await asyncio.sleep(0.001)
    os.kill(grammars._starts._running.pid, signal.SIGKILL)
    assert await asked == ""


async def test_a_tokenizer_that_the_compiler_misreads() -> None:
    """The decoders of a tokenizer made of GGUF: llguidance takes the first of them for all. It
    would let through spaces where none may be, since it takes them for letters.
    """
    gguf = Toy()
    gguf.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
    )
    made = Grammars(gguf, len(gguf), 5.0)
    try:
        for wanted in ("[^ ]{3,9}", "a b"):
            said = await made.fault("regex", wanted)
            assert "misreads this model's tokenizer: token" in said
            assert len(said) < 200
    finally:
        await made.close()


async def test_a_tokenizer_that_the_compiler_can_not_read() -> None:
    strange = Toy()
    strange.backend_tokenizer.decoder = decoders.WordPiece()
    made = Grammars(strange, len(strange), 5.0)
    try:
        assert "tokenizer" in await made.fault("regex", "a")
    finally:
        await made.close()


async def test_close_leaves_no_process() -> None:
    made = Grammars(TOY, len(TOY), 60.0)
    waiting = asyncio.ensure_future(made.fault("json", SLOW))
    await made.unfinished("regex", "a", TOY.ids("a"))
    running = [made._starts._running, made._ends._running]
    await made.close()
    assert [p is not None and p.returncode is not None for p in running] == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(EngineDead):
        await made.fault("regex", "a")
    assert [p is not None and p.returncode is not None for p in running] == [True, True]


async def test_a_slow_tokenizer() -> None:
    made = Grammars(object(), 10, 1.0)
    assert "tokenizer" in await made.fault("regex", "a")


ENDS = [
    (("regex", "a{2,4}"), "aa", ""),
    (("regex", "a{2,4}"), "aaaa", ""),
    (("regex", "a{2,4}"), "a", "not complete after 1"),
    (("regex", "a{2,4}"), "aab", "token 2: not allowed"),
    (("choice", '["red", "blue"]'), "blue", ""),
    (("choice", '["red", "blue"]'), "bl", "not complete"),
    (schema(type="object", properties={"a": {"type": "integer"}}, required=["a"]), '{"a": 12}', ""),
    (schema(type="object", properties={"a": {"type": "integer"}}, required=["a"]), '{"a"', "not"),
    # llguidance takes the grammar, and gives up at the first property: too many may follow.
    (
        schema(type="object", properties={f"p{i}": {"type": "null"} for i in range(900)}),
        "{",
        "items",
    ),
]


@pytest.mark.parametrize(("wanted", "text", "fault"), ENDS, ids=lambda value: str(value)[:40])
async def test_ends(grammars: Grammars, wanted: tuple[str, str], text: str, fault: str) -> None:
    said = await grammars.unfinished(*wanted, TOY.ids(text))
    assert fault in said if fault else said == ""


NODE = {
    "$defs": {"Item": {"type": "object", "properties": {"a": {"type": "integer"}},
                       "required": ["a"], "additionalProperties": False}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/Item"}, "next": {"$ref": "#"},
                   "note": {"const": {"$ref": "#/$defs/Item"}}},
    "required": ["x"], "additionalProperties": False,
}  # fmt: skip
CALLS = [
    ('[{"name": "g", "parameters": {"x": {"a": 1}, "next": {"x": {"a": 2}}}}]', ""),
    ('[{"name": "g", "parameters": {"x": {"a": 1}, "note": {"$ref": "#/$defs/Item"}}}]', ""),
    ('[{"name": "f", "parameters": {"q": 1}}, {"name": "g", "parameters": {"x": {"a": 1}}}]', ""),
    ('[{"name": "g", "parameters": {"x": {"a": "text"}}}]', "not allowed"),
    ('[{"name": "g", "parameters": {"x": {"a": 1}, "next": {}}}]', "not allowed"),
    ('[{"name": "f", "parameters": {"x": {"a": 1}}}]', "not allowed"),
]


@pytest.mark.parametrize(("text", "fault"), CALLS)
async def test_required_calls_know_their_own_references(
    grammars: Grammars, text: str, fault: str
) -> None:
    """A function's schema refers to its own root, which is not that of the list of calls."""
    other = {"type": "object", "properties": {"q": {"type": "integer"}},
             "additionalProperties": False}  # fmt: skip
    tools = tuple(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("f", other), ("g", NODE))
    )
    wanted = ToolPlan("required", tools).structured()
    assert wanted is not None
    assert await grammars.fault(*wanted) == ""
    said = await grammars.unfinished(*wanted, TOY.ids(text))
    assert fault in said if fault else said == ""
