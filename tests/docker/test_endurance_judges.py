"""What the endurance tests judge by, given what it should catch."""

from __future__ import annotations

import json
import os
import socket

import pytest

from tests.endurance.served import bits, joined, open_files, rss_bytes
from tests.endurance.soak import MOST_GROWTH, growth, probes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("samples", "grows"),
    [
        ([1000 * MIB] * 60, False),
        ([1000 * MIB + min(i, 15) * 4 * MIB for i in range(60)], False),  # warm-up only
        ([1000 * MIB + i * 2 * MIB for i in range(60)], True),  # 2 MiB every ten seconds
        ([1000 * MIB - i * MIB for i in range(60)], False),
        ([1000 * MIB] * 2, False),
    ],
)
def test_memory_that_grows(samples: list[int], grows: bool) -> None:
    assert (growth(samples) >= MOST_GROWTH) is grows


def chunk(text: str, reason: str | None, usage: int | None) -> str:
    logprobs = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}],
                "text_offset": [0]}  # fmt: skip
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}
    whole = {"system_fingerprint": "sb1", "choices": [choice], "usage": None}
    last = {"system_fingerprint": "sb1", "choices": [], "usage": {"completion_tokens": usage}}
    return f"data: {json.dumps(whole if usage is None else last)}\n\n"


def test_streams_are_compared_with_plain_answers() -> None:
    events = chunk("a", None, None) + chunk("b", "stop", None) + chunk("", None, 2)
    found = joined(events + "data: [DONE]\n\n")
    assert found["choices"][0]["text"] == "ab" and found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    other = joined(events.replace("-0.5", "-0.5000000000000001", 1))
    assert bits(found) != bits(other)
    with pytest.raises(ValueError, match="gone"):
        joined(events + 'data: {"error": {"message": "gone"}}\n\n')


def test_what_a_process_holds() -> None:
    before = open_files(os.getpid())
    with socket.create_server(("127.0.0.1", 0)):
        assert open_files(os.getpid()) - before == {"tcp listening": 1}
    assert rss_bytes(os.getpid()) > 10 * MIB


def test_probes_are_fixed() -> None:
    """No unseeded sampling among them: its answers may differ."""
    assert json.dumps(probes()) == json.dumps(probes())
    assert all(p["temperature"] == 0 or p["seed"] is not None for p in probes().values())
