"""Seeds as the HTTP side treats them: read exactly, assigned visibly, reported truly."""

from __future__ import annotations

import random

import pytest

from tests.server.live import Live, serving


def _text(live: Live, **body: object) -> str:
    return str(live.complete(prompt="Hello", max_tokens=12, **body)["choices"][0]["text"])


@pytest.mark.parametrize("seed", [-(2**63), -2, -1, 0, 1, 2**53 + 1, 2**63 - 1])
def test_a_seed_is_a_seed(live: Live, seed: int) -> None:
    answer = live.complete(prompt="Hello", seed=seed, n=3, max_tokens=12)
    assert answer["samebits"] == {"seed": seed, "seed_from": "request"}
    assert live.engine.asked[-1].seed == seed
    assert [s.choice for s in live.engine.asked[-3:]] == [0, 1, 2]
    _text(live, temperature=0)
    _text(live)
    assert (
        live.complete(prompt="Hello", seed=seed, n=3, max_tokens=12)["choices"]
        == (answer["choices"])
    )


def test_different_seeds_differ(live: Live) -> None:
    assert len({_text(live, seed=seed) for seed in range(-5, 5)}) == 10


def test_an_assigned_seed_repeats_the_answer(live: Live) -> None:
    seen = set()
    for stream in (False, True):
        body = {"prompt": "Hello", "max_tokens": 12, "n": 2}
        if stream:
            chunks = live.events(**body)
            shown = chunks[0]["samebits"]
            texts = ["".join(c["text"] for k in chunks for c in k["choices"] if c["index"] == i)
                     for i in (0, 1)]  # fmt: skip
        else:
            answer = live.complete(**body)
            shown = answer["samebits"]
            texts = [c["text"] for c in answer["choices"]]
        assert shown["seed_from"] == "assigned"
        assert 0 <= shown["seed"] < 2**53
        again = live.complete(**body, seed=shown["seed"])
        assert [c["text"] for c in again["choices"]] == texts
        seen.add(shown["seed"])
    assert len(seen) == 2


def test_assigned_seeds_do_not_follow_the_process_state(live: Live) -> None:
    found = []
    for _ in range(2):
        random.seed(0)
        found.append(live.complete(prompt="a", max_tokens=1)["samebits"]["seed"])
    assert found[0] != found[1]


def test_greedy_uses_no_seed_and_says_so(live: Live) -> None:
    answers = [live.complete(prompt="Hello", temperature=0, seed=s) for s in (None, 1, 2)]
    assert len({a["choices"][0]["text"] for a in answers}) == 1
    assert all(a["samebits"] == {"seed": None, "seed_from": "unused"} for a in answers)
    header = live.post("/v1/completions", {"prompt": "a", "temperature": 0, "seed": 1}).headers
    assert header["x-samebits-seed"] == "unused"
    header = live.post("/v1/completions", {"prompt": "a", "seed": -1, "stream": True}).headers
    assert header["x-samebits-seed"] == "-1"


def test_policies() -> None:
    with serving(seed_policy="require") as live:
        answer = live.post("/v1/completions", {"prompt": "a"})
        assert answer.json()["error"]["param"] == "seed"
        assert _text(live, seed=0)
        assert _text(live, temperature=0)
    with serving(seed_policy="fixed:-7") as live:
        answer = live.complete(prompt="a")
        assert answer["samebits"] == {"seed": -7, "seed_from": "fixed"}
        assert live.complete(prompt="a", seed=3)["samebits"]["seed"] == 3


def test_a_continuation_has_the_draws_of_the_whole(live: Live) -> None:
    _text(live, seed=1, samebits_position_offset=12)
    assert live.engine.asked[-1].position_offset == 12


def test_options_reach_the_engine(live: Live) -> None:
    live.complete(
        prompt="a", max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1,
        seed=3, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1,
        logit_bias={"9": 1.5, "8": -2}, allowed_token_ids=[9, 8, 9], bad_words=["x"], stop="s",
        stop_token_ids=[7, 6], include_stop_str_in_output=True, ignore_eos=True,
        skip_special_tokens=False, spaces_between_special_tokens=False, logprobs=3,
        prompt_logprobs=2,
    )  # fmt: skip
    asked = live.engine.asked[-1]
    assert asked.max_tokens == 7
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.5, 0.9, 5, 0.1)
    assert asked.logit_bias == ((8, -2.0), (9, 1.5))
    assert asked.allowed_token_ids == (8, 9)
    assert (asked.stop, asked.stop_token_ids, asked.bad_words) == (("s",), (6, 7), ("x",))
    assert (asked.logprobs, asked.prompt_logprobs) == (3, 2)
    assert (asked.min_tokens, asked.ignore_eos, asked.skip_special_tokens) == (2, True, False)
    assert asked.include_stop_str_in_output and not asked.spaces_between_special_tokens
    penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    assert penalties == (1.0, -1.0, 1.1)
    live.complete(prompt="a", structured_outputs={"choice": ["a", "b"]})
    assert live.engine.asked[-1].structured == ("choice", '["a", "b"]')
    live.complete(prompt="a", top_p=0, top_k=-1)
    asked = live.engine.asked[-1]
    assert (asked.top_p, asked.top_k) == (1.0, 1), "top_p 0 is the most likely token alone"
