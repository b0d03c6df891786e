"""A streamed answer is the plain one, array for array; and what each of the two looks like."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.server.fake import FakeEngine
from tests.server.live import Live, serving, strict

ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
STOPS = (None, "STOP", "h", ["é S", "zz"], "never", "\U0001f642")
PROMPTS: tuple[Any, ...] = (
    "Hello say:one \U0001f642 two é STOP three",
    "The future of AI is",
    [258, 259, 260],
    ["Hello", "say:日本語 STOP日"],
    [[272], [257, 258]],
)


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices put together from a stream."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(
                choice["index"], {"text": "", "ids": [], **{name: [] for name in ARRAYS}}
            )
            assert "finish_reason" not in whole, "something came after the end"
            whole["text"] += choice["text"]
            whole["ids"] += choice.get("token_ids") or []
            for name in ARRAYS:
                whole[name] += (choice["logprobs"] or {}).get(name, [])
            if choice["finish_reason"]:
                whole["finish_reason"] = choice["finish_reason"]
                whole["stop_reason"] = choice["stop_reason"]
            for name in ("prompt_token_ids", "prompt_logprobs"):
                if name in choice:
                    whole[name] = choice[name]
    return found


def plain(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found = {}
    for choice in answer["choices"]:
        whole = {"text": choice["text"], "ids": choice.get("token_ids") or []}
        whole |= {name: (choice["logprobs"] or {}).get(name, []) for name in ARRAYS}
        whole |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in choice:
                whole[name] = choice[name]
        found[choice["index"]] = whole
    return found


@pytest.fixture(scope="module", params=[1, 3])
def held(request: pytest.FixtureRequest) -> Any:
    """Servers whose engine gives one token an output, or three."""
    with serving(FakeEngine(hold=request.param)) as server:
        yield server


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_streamed_is_plain(held: Live, prompt: Any, stop: Any) -> None:
    for echo, logprobs, n in itertools.product((False, True), (None, 0, 2), (1, 2)):
        body = {
            "prompt": prompt, "stop": stop, "echo": echo, "logprobs": logprobs, "n": n,
            "max_tokens": 40, "seed": 3, "return_token_ids": True,
        }  # fmt: skip
        whole = held.complete(**body)
        chunks = held.events(**body, stream_options={"include_usage": True})
        assert joined(chunks) == plain(whole)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        _well_formed(whole, echo, logprobs, stop)
        assert all("\ufffd" not in c["text"] for chunk in chunks for c in chunk["choices"])


def _well_formed(answer: dict[str, Any], echo: bool, logprobs: int | None, stop: Any) -> None:
    for choice in answer["choices"]:
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            arrays = [choice["logprobs"][name] for name in ARRAYS]
            assert len({len(array) for array in arrays}) == 1
            spelled = [t for t in arrays[0] if t != "<eos>" and not t.startswith("bytes:")]
            ascii_text = "".join(c for c in choice["text"] if c.isascii())
            if choice["stop_reason"]:  # the last token shown may reach into the stop text
                assert "".join(spelled).startswith(ascii_text)
                assert "".join(spelled[:-1]) == ascii_text[: len("".join(spelled[:-1]))]
            else:
                assert "".join(spelled) == ascii_text
            offsets = arrays[3]
            assert offsets == sorted(offsets)
            assert not offsets or offsets[-1] <= len(choice["text"])
        if choice["stop_reason"] and not echo:
            stops = [stop] if isinstance(stop, str) else stop
            assert choice["finish_reason"] == "stop"
            assert not any(s in choice["text"] for s in stops)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Hello world", [272, 273], ["Hello", " the"]], ids=str)
def test_scoring_a_prompt(live: Live, prompt: Any, n: int, logprobs: Any, stream: bool) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": n}
    if stream:
        chunks = live.events(**body, stream_options={"include_usage": True})
        choices, usage = joined(chunks), chunks[-1]["usage"]
    else:
        answer = live.complete(**body)
        choices, usage = plain(answer), answer["usage"]
    texts = ["Hello", " the"] if isinstance(prompt[0], str) and len(prompt) == 2 else None
    assert len(choices) == (len(texts) if texts else 1) * n
    assert usage["completion_tokens"] == 0
    for index, choice in choices.items():
        assert choice["text"] == (texts[index // n] if texts else "Hello world")
        assert choice["finish_reason"] == "length"
        if logprobs is not None:
            assert choice["token_logprobs"][0] is None
            assert choice["top_logprobs"][0] is None
            assert all(value is not None for value in choice["token_logprobs"][1:])


def test_indices_run_prompt_by_prompt(live: Live) -> None:
    body = {"prompt": ["Hello", " the"], "n": 3, "seed": 5, "max_tokens": 8}
    together = [c["text"] for c in live.complete(**body)["choices"]]
    alone = [
        c["text"]
        for prompt in body["prompt"]
        for c in live.complete(**{**body, "prompt": prompt})["choices"]
    ]
    assert together == alone
    assert [c["index"] for c in live.complete(**body)["choices"]] == list(range(6))


def test_a_choice_does_not_depend_on_n(live: Live) -> None:
    body = {"prompt": "Hello", "seed": 5, "max_tokens": 12}
    three = [c["text"] for c in live.complete(**body, n=3)["choices"]]
    five = [c["text"] for c in live.complete(**body, n=5)["choices"]]
    assert five[:3] == three
    assert len(set(five)) == 5
    assert live.complete(**{**body, "seed": 6})["choices"][0]["text"] not in three


def test_continuous_usage(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = live.events(prompt="Hello", max_tokens=5, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 5]
    assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)


def test_without_usage_there_is_no_extra_chunk(live: Live) -> None:
    chunks = live.events(prompt="Hello", max_tokens=3, seed=1)
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1]
    assert all("usage" not in chunk for chunk in chunks)


def _message(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat choice put together from a stream."""
    found: dict[str, Any] = {"content": None, "logprobs": [], "calls": []}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        delta = choice["delta"]
        if "role" in delta:
            assert "role" not in found
            found["role"] = delta["role"]
        if "content" in delta:
            found["content"] = (found["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found["calls"].append({"id": call["id"], **call["function"]})
            else:
                found["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        found["finish_reason"] = choice["finish_reason"] or found.get("finish_reason")
    return found


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("said", "extra", "reason"),
    [
        ("one \U0001f642 two", {}, "stop"),
        ("one \U0001f642 two", {"stop": "w"}, "stop"),
        ("one \U0001f642 two", {"max_tokens": 6}, "length"),
        ('Wait.<tool>{"name": "f", "arguments": {"a": 1}}', {"tools": TOOLS}, "tool_calls"),
        ("no call", {"tools": TOOLS}, "stop"),
        ('{"a": 1}', {"tools": TOOLS, "tool_choice": NAMED}, "stop"),
        (
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]',
            {"tools": TOOLS, "tool_choice": "required"},
            "tool_calls",
        ),
        ("[{", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2}, "length"),
        ("<tool>x", {"tools": TOOLS, "tool_choice": "none"}, "stop"),
    ],
)
def test_chat_streamed_is_plain(said: str, extra: dict[str, Any], reason: str) -> None:
    messages = [{"role": "user", "content": f"say:{said}"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "seed": 1, **extra}
    path = "/v1/chat/completions"
    with serving(FakeEngine(tool_parser="toy")) as live:
        answer = strict(live.post(path, body).text)
        again = strict(live.post(path, body).text)
        streamed = _message(live.events(path, **body))
        asked = live.engine.asked[-1].structured
    choice = answer["choices"][0]
    assert choice["finish_reason"] == streamed["finish_reason"] == reason
    assert choice["logprobs"]["content"] == streamed["logprobs"]
    assert (choice["message"]["content"] or "") == (streamed["content"] or "")
    assert streamed["role"] == choice["message"]["role"] == "assistant"
    calls = [{"id": c["id"], **c["function"]} for c in choice["message"].get("tool_calls", ())]
    assert calls == streamed["calls"]
    assert again["choices"] == answer["choices"], "ids of calls must repeat as well"
    assert (asked is not None) == (extra.get("tool_choice") in (NAMED, "required"))
    assert bool(calls) == (reason == "tool_calls" or extra.get("tool_choice") == NAMED)
