"""Logprobs: raw, complete, finite; tokens that print alike stay apart."""

from __future__ import annotations

import math

import pytest

from server.engine import Position, TokenLogprob
from server.errors import EngineFailed
from server.logprobs import FLOOR, Offsets, completion_logprobs, finite, raw_bytes, top_map
from tests.server.fake import FIRST_WORD, WORDS, FakeEngine
from tests.server.live import Live, serving, strict


def _token(token_id: int, text: str, logprob: float = -1.0) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, 1, text)


def test_tokens_that_print_alike_keep_their_entries() -> None:
    tops = (_token(1, "a", -0.1), _token(2, "a", -0.2), _token(3, "a", -0.3), _token(4, "b", -0.4))
    chosen = tops[1]
    found = top_map(Position(chosen, tops), 4, as_ids=False)
    assert found == {"token_id:1": -0.1, "a": -0.2, "token_id:3": -0.3, "b": -0.4}
    outside = top_map(Position(_token(9, "b", -5.0), tops), 4, as_ids=False)
    assert outside == {
        "a": -0.1, "token_id:2": -0.2, "token_id:3": -0.3, "token_id:4": -0.4, "b": -5.0
    }  # fmt: skip


@pytest.mark.parametrize("k", range(5))
def test_a_value_does_not_depend_on_how_many_are_asked_for(k: int) -> None:
    tops = tuple(_token(i, "x", -float(i)) for i in range(5))
    wide = top_map(Position(_token(7, "y"), tops), 5, as_ids=False)
    narrow = top_map(Position(_token(7, "y"), tops), k, as_ids=False)
    assert len(narrow) == k + 1
    assert narrow.items() <= wide.items()


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_counts_over_http(live: Live, k: int) -> None:
    twins = [i + FIRST_WORD for i, word in enumerate(WORDS) if word == " same"]
    assert len(twins) == 2, "the fake needs two tokens that print alike"
    answer = live.complete(
        prompt="Hello", logprobs=k, max_tokens=8, allowed_token_ids=twins, return_token_ids=True
    )
    arrays = answer["choices"][0]["logprobs"]
    for token, value, top in zip(
        arrays["tokens"], arrays["token_logprobs"], arrays["top_logprobs"], strict=True
    ):
        assert len(top) in (k, k + 1)
        assert top[token] == value


def test_a_value_that_is_no_number_is_an_error_of_that_request_only() -> None:
    for value, status in ((math.nan, 500), (math.inf, 500), (-math.inf, 200), (-1e30, 200)):
        with serving(FakeEngine(logprob=value)) as live:
            body = {"prompt": "Hello", "logprobs": 1, "max_tokens": 2}
            answer = live.post("/v1/completions", body)
            assert answer.status_code == status
            shown = strict(answer.text)
            if status == 200:
                assert shown["choices"][0]["logprobs"]["token_logprobs"] == [FLOOR, FLOOR]
            else:
                assert "not a number" in answer.text or "infinite" in answer.text
                chunks = live.events(**body)
                assert "error" in chunks[-1]
            chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
            answer = live.post("/v1/chat/completions", {**chat, "max_tokens": 1})
            assert answer.status_code == status
            strict(answer.text)
            assert live.complete(prompt="Hello", max_tokens=2)["choices"]


def test_finite() -> None:
    assert finite(-1.5) == -1.5
    assert finite(-math.inf) == finite(-1e308) == FLOOR
    for value in (math.nan, math.inf):
        with pytest.raises(EngineFailed):
            finite(value)


def test_bytes_spellings() -> None:
    assert raw_bytes("bytes:\\xf0\\x9f") == b"\xf0\x9f"
    for text in ("a", "bytes:", "bytes:\\xzz", "bytes:x\\xf0"):
        assert raw_bytes(text) is None


def test_offsets_count_characters_that_tokens_complete() -> None:
    offsets = Offsets(0)
    smile = ["bytes:\\xf0\\x9f", "bytes:\\x99", "bytes:\\x82"]
    starts = [offsets.advance(text) for text in ["ab", *smile, "c", "bytes:\\xf0", "d"]]
    assert starts == [0, 2, 2, 2, 3, 4, 5]
    assert offsets.at == 6


def test_emoji_bytes_reach_the_client(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "say:\U0001f642"}], "logprobs": True}
    content = live.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(item["bytes"]) for item in content if item["token"] != "<eos>")
    assert raw.decode() == "\U0001f642"


def test_logprobs_only_observe(live: Live) -> None:
    texts = {
        live.complete(prompt="Hello", seed=3, max_tokens=20, logprobs=k)["choices"][0]["text"]
        for k in (None, 0, 5)
    }
    assert len(texts) == 1


def test_token_ids_as_tokens(live: Live) -> None:
    answer = live.complete(
        prompt=[257, 258], echo=True, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True
    )
    arrays = answer["choices"][0]["logprobs"]
    assert arrays["tokens"][:2] == ["token_id:257", "token_id:258"]
    assert all(key.startswith("token_id:") for key in arrays["top_logprobs"][1])


def test_prompt_logprobs(live: Live) -> None:
    choice = live.complete(prompt="Hello world.", prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert all({"logprob", "rank", "decoded_token"} == set(e) for m in rest for e in m.values())
    assert [str(273) in rest[0], str(274) in rest[1]] == [True, True]


def test_the_sampled_token_is_there_when_the_first_arrays_are_asked_apart(live: Live) -> None:
    both = live.complete(prompt="Hello world", echo=True, logprobs=1, prompt_logprobs=3)
    only = live.complete(prompt="Hello world", echo=True, logprobs=1)
    seedless = ("token_logprobs", "text_offset")
    shown, alone = both["choices"][0]["logprobs"], only["choices"][0]["logprobs"]
    assert {len(shown[name]) for name in seedless} == {len(alone[name]) for name in seedless}
    assert all(len(top) <= 2 for top in shown["top_logprobs"][1:])
    assert completion_logprobs([], 1, False)["tokens"] == []
