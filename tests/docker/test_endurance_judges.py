"""What the endurance tests judge by, given what it should catch."""

from __future__ import annotations

import json
import os
import random
import socket
import time

import httpx
import pytest

from tests.endurance.served import Findings, bits, joined, open_files, rss_bytes
from tests.endurance.soak import MOST_GROWTH, Soak, growth, judge, probes

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


async def test_a_probe_whose_last_bit_changes_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """The fifth answer differs by one unit in the last place of one logprob."""
    asked = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        value = -0.5 if asked != 5 else -0.5000000000000001
        choice = {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": [value]}
        usage = {"completion_tokens": 1}
        body = {"choices": [choice], "usage": usage, "system_fingerprint": "sb1"}
        return httpx.Response(200, json=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as one:
        run = Soak(one, _Ended(), time.monotonic() + 1, random.Random(4))  # type: ignore[arg-type]
        run.wanted["greedy"] = await run.probe("greedy", {}) or ""
        while asked < 6:
            run.stops = time.monotonic() + 0.01
            await run.probing("greedy", {})
        see = Findings()
        await judge(run, see)
    assert run.changed == {"greedy": 1} and see.failed
    assert "CHANGED {'greedy': 1}" in capsys.readouterr().out


class _Ended:
    """A server that has ended."""

    log = "last words"

    class process:
        @staticmethod
        def poll() -> int:
            return 1
