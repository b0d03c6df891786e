"""Limits that are settings: answered before any work; and the queue."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.server.fake import FakeEngine
from tests.server.live import Live, serving, until


@pytest.mark.parametrize(
    ("setting", "limit", "good", "bad"),
    [
        ("max_prompts", 2, {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}),
        ("max_n", 2, {"n": 2}, {"n": 3}),
        ("max_choices", 4, {"n": 2, "prompt": ["a"] * 2}, {"n": 3, "prompt": ["a"] * 2}),
        ("max_queue", 4, {"n": 4}, {"n": 5}),
        ("max_stop", 1, {"stop": ["a"]}, {"stop": ["a", "b"]}),
        ("max_stop_chars", 3, {"stop": "abc"}, {"stop": "abcd"}),
        ("max_logit_bias", 1, {"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1, "6": 1}}),
        ("max_bad_words", 1, {"bad_words": ["a"]}, {"bad_words": ["a", "b"]}),
        ("max_logprobs", 2, {"logprobs": 2}, {"logprobs": 3}),
        ("max_logprobs", 2, {"prompt_logprobs": 2}, {"prompt_logprobs": 3}),
        (
            "max_grammar_chars",
            4,
            {"structured_outputs": {"regex": "aaaa"}},
            {"structured_outputs": {"regex": "aaaaa"}},
        ),
        (
            "max_grammar_chars",
            4,
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
        ),
        ("max_json_depth", 4, {"metadata": {"a": [1]}}, {"metadata": {"a": [[[1]]]}}),
    ],
)
def test_each(setting: str, limit: int, good: dict[str, Any], bad: dict[str, Any]) -> None:
    with serving(**{setting: limit}) as live:
        base = {"prompt": "a", "max_tokens": 1, "seed": 1}
        assert live.post("/v1/completions", {**base, **good}).status_code == 200
        before = len(live.engine.started)
        answer = live.post("/v1/completions", {**base, **bad})
        assert answer.status_code == 400
        assert str(limit) in answer.json()["error"]["message"]
        assert len(live.engine.started) == before


def test_the_context(live: Live) -> None:
    assert live.complete(prompt=[257] * 500, max_tokens=12)["usage"]["total_tokens"] == 512
    answer = live.post("/v1/completions", {"prompt": [257] * 500, "max_tokens": 13})
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "512" in error["message"]
    error = live.post("/v1/completions", {"prompt": [257] * 513}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    error = live.post("/v1/completions", {"prompt": ["a", "b " * 400]}).json()["error"]
    assert error["param"] == "prompt[1]"
    messages = [{"role": "user", "content": "a " * 600}]
    error = live.post("/v1/chat/completions", {"messages": messages}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    messages = [{"role": "user", "content": "Hello"}]
    chat = live.post("/v1/chat/completions", {"messages": messages, "seed": 1}).json()
    assert chat["usage"]["total_tokens"] == 512, "chat without max_tokens goes to the end"


def test_more_tokens_than_the_context_are_not_turned_into_text(live: Live) -> None:
    assert live.post("/detokenize", {"tokens": [257] * 512}).status_code == 200
    error = live.post("/detokenize", {"tokens": [257] * 513}).json()["error"]
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")


def test_a_text_that_can_not_fit_is_not_tokenized() -> None:
    class Counting(FakeEngine):
        tokenized = 0

        async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            self.tokenized += 1
            return await super().tokenize(text, add_special_tokens)

    engine = Counting()
    with serving(engine) as live:
        long = "a" * 4 * 512 * 8
        for path, body in (
            ("/v1/completions", {"prompt": ["b", long]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ):
            answer = live.post(path, body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert engine.tokenized <= 1
        kept = {"prompt": long, "truncate_prompt_tokens": 3, "max_tokens": 1}
        assert live.complete(**kept)["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"truncate_prompt_tokens": 2}, " is and"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, " the of"),
        ({"truncate_prompt_tokens": 99}, " the of AI is and"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 509}, " AI is and"),
    ],
)
def test_truncation(live: Live, extra: dict[str, Any], shown: str) -> None:
    body = {"prompt": " the of AI is and", "echo": True, "max_tokens": 1, "seed": 1, **extra}
    answer = live.complete(**body)
    assert answer["choices"][0]["text"].startswith(shown)
    assert answer["usage"]["prompt_tokens"] == len(shown.split())


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine(delay_s=0.02)
    with serving(engine, max_queue=6, max_num_seqs=2) as live:

        def hold() -> None:
            httpx.post(live.url + "/v1/completions", json={"prompt": "a", "n": 5, "max_tokens": 50})

        thread = threading.Thread(target=hold)
        thread.start()
        assert until(lambda: len(engine.running) == 5, 5)
        for stream in (False, True):
            answer = live.post("/v1/completions", {"prompt": "a", "n": 2, "stream": stream})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert live.complete(prompt="a", max_tokens=1)["choices"], "one more fits"
        thread.join()
        assert live.settled()
        assert live.post("/v1/completions", {"prompt": "a", "n": 6}).status_code == 200
        refused = live.http.get("/metrics").text
        assert 'samebits_refusals_total{reason="queue_full"} 2.0' in refused
