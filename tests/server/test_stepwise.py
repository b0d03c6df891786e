"""Large bodies are read in steps: the same values and the same refusals as the standard parser's,
and nobody waits meanwhile.
"""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import pytest

from server import stepwise
from server.errors import InvalidRequest
from server.wire import LARGE_BYTES, loads
from tests.server.live import Live

PAD = b" " * (LARGE_BYTES + 1)
ODD = (
    '{}', '{"a": []}', '{"a": [ ]}', '{"a": [1, 2.5, -3e-2, true, false, null]}', '{"a":[1,]}',
    '{"a":[,1]}', '{"a":[1,,2]}', '{"a":[1 2]}', '{"a":[1', '{"a":["x"', '{"a":["x",]}', '{"a":1,}',
    '{"a" 1}', '{a:1}', '{"a":}', '{"a":1 "b":2}', '{"a":{}}', '{"a":{"b":[[],{}]}}', '{"a":1}x',
    '{"a":"\\u00e9\\n\\ud83d\\ude42"}', '{"a":"\\ud83d"}', '{"a":"\t"}', '{"a":"x', '{"a":tru}',
    '{"a":[NaN]}', '{"a":-Infinity}', '{"a":{"b":[1,1e999]}}', '{"a":1,"a":2}', '{"a":[01]}',
    '{"a":[1}', '{"a":[{"b":1]}', '{"a":-}', '{"a":1.}', '{"a":[1.e5]}', '[]', '5', '"x"', '', 'n',
    '{"a":' + "9" * 5000 + "}", '{"a":[' + "9" * 5000 + "]}", '{"a":0.' + "1" * 5000 + "}",
    '{"a":' + "[" * 40 + "]" * 40 + "}", '{"a":' + "[" * 63 + "]" * 63 + "}",
    '{"a":' + "[" * 64 + "]" * 64 + "}", '{"a":' + '{"b":' * 64 + "1" + "}" * 64 + "}",
    "\ufeff{}", '{"a":[1,"x",2,[3,4],{"c":null}]}', "{'a':1}", '{"a":1]', '{"a":[1\x0b,2]}',
)  # fmt: skip


def outcome(body: bytes) -> Any:
    try:
        return json.dumps(loads(body, max_depth=64))
    except InvalidRequest as fault:
        message = str(fault).partition(" at line")[0]
        # The standard parser names a broken word or list otherwise in some places.
        return ("not JSON" if "is not JSON" in message else message, fault.param)


@pytest.mark.parametrize("text", ODD)
def test_the_same_as_the_standard_parser(text: str) -> None:
    assert outcome(text.encode() + PAD) == outcome(text.encode())
    assert outcome(PAD + text.encode()) == outcome(text.encode())


def test_broken_bodies_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepwise, "SLICE_CHARS", 3)
    monkeypatch.setattr(stepwise, "PAUSE_S", 0)
    chance = random.Random(5)
    whole = '{"p": [1, 22, -3.5, 4e2, null], "q": {"r": ["s\\u00e9", [], [[7,8],[9]]]}, "t": true}'
    good = 0
    for _ in range(4000):
        letters = list(whole)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(letters))
            letters[at] = chance.choice(["", letters[at], *'{}[]",:1e- N'])
        body = "".join(letters).encode()
        plain = outcome(body)
        good += isinstance(plain, str)
        assert outcome(body + PAD) == plain, body
    assert good > 500


def test_slices_lose_nothing() -> None:
    ids = [i * 7919 % 50257 for i in range(100_000)]
    lists = [ids[:5000], [], ids[:3], [1.5, -2, True]]
    body = {"prompt": ids, "more": lists}
    assert loads(json.dumps(body).encode(), max_depth=64) == body
    assert loads(json.dumps(body, indent=1).encode(), max_depth=64) == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}}, "logit_bias"),
        ({"prompt": ["a"] * 200_000}, "prompt"),
        ({"prompt": [[1]] * 200_000}, "prompt"),
        ({"messages": [{"role": "user"}] * 100_000}, "messages"),
        ({f"key {i}": 1 for i in range(100_000)}, ""),
    ],
)
def test_too_many_entries_are_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = live.raw(json.dumps(body), path)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "more than" in error["message"]
    assert error["param"].startswith(param)


def test_others_go_on_meanwhile() -> None:
    """The longest that another thread waits is a part of what the standard parser takes."""
    body = b'{"prompt":[' + b"1," * 2_000_000 + b"1]}"
    waits: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            begun = time.perf_counter()
            time.sleep(0.001)
            waits.append(time.perf_counter() - begun)

    watcher = threading.Thread(target=watch)
    watcher.start()
    loads(body, max_depth=64)
    done.set()
    watcher.join()
    assert len(waits) > 50, "another thread hardly ran"


def test_a_long_answer_is_one_list(live: Live) -> None:
    text = "the of" * 6000
    shown = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert shown["count"] == len(shown["tokens"]) == len(shown["token_strs"]) > 8192
    assert "".join(shown["token_strs"]) == text
    assert set(shown) == {"count", "max_model_len", "tokens", "token_strs"}
