"""The HTTP side over the real engine: what a fake one can't show."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Running, serving
from tests.server.live import strict, until
from tests.server.test_http_streams import ARRAYS, joined, plain

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return strict(answer.text)


def events(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [strict(block.removeprefix("data: ")) for block in blocks[:-2]]


def ids_of(http: httpx.Client, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(http.post("/tokenize", json=body).json()["tokens"])


@pytest.mark.parametrize("stop", [None, "e", ["\n", "of a"]], ids=str)
@pytest.mark.parametrize("prompt", ["Smile: \U0001f642 日本", ["One, two", "It's"]], ids=str)
def test_streamed_is_plain(http: httpx.Client, prompt: Any, stop: Any) -> None:
    for echo, logprobs, n in ((False, None, 1), (False, 2, 2), (True, 2, 1)):
        body = {
            "prompt": prompt, "stop": stop, "echo": echo, "logprobs": logprobs, "n": n,
            "max_tokens": 12, "seed": 3, "return_token_ids": True,
        }  # fmt: skip
        whole = complete(http, **body)
        chunks = events(http, **body, stream_options={"include_usage": True})
        assert joined(chunks) == plain(whole)
        assert chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            _matches(choice, echo, logprobs)


def _matches(choice: dict[str, Any], echo: bool, logprobs: int | None) -> None:
    """Tokens spell the text, offsets point into it."""
    if logprobs is None:
        return
    arrays = choice["logprobs"]
    assert len({len(arrays[name]) for name in ARRAYS}) == 1
    text = choice["text"]
    for token, start in zip(arrays["tokens"], arrays["text_offset"], strict=True):
        if token.startswith("bytes:") or re.fullmatch(r"<\|.*\|>", token):
            continue
        shown = text[start : start + len(token)]
        assert token == shown or (choice["stop_reason"] and token.startswith(shown))
    skip = 1 if echo else 0
    for token, value, top in list(
        zip(arrays["tokens"], arrays["token_logprobs"], arrays["top_logprobs"], strict=True)
    )[skip:]:
        assert top[token] == value
        assert len(top) in (logprobs, logprobs + 1)


def test_an_emoji_is_never_split(http: httpx.Client) -> None:
    smile = ids_of(http, "\U0001f642")
    assert len(smile) > 1, "the tokenizer knows this one whole; take another"
    for count in (len(smile), len(smile) + 1, 3 * len(smile)):
        body = {
            "prompt": "a", "temperature": 0, "max_tokens": count, "logprobs": 2,
            "structured_outputs": {"regex": "(\U0001f642)+"},
        }  # fmt: skip
        whole = complete(http, **body)
        chunks = events(http, **body)
        assert joined(chunks) == plain(whole)
        assert all("\ufffd" not in c["text"] for k in chunks for c in k["choices"])
        tokens = whole["choices"][0]["logprobs"]["tokens"]
        assert any(token.startswith("bytes:") for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hello world, hello", [504, 505, 506]], ids=str)
def test_scoring(http: httpx.Client, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 3}
    found = joined(events(http, **body))[0] if stream else plain(complete(http, **body))[0]
    assert found["token_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    assert found["finish_reason"] == "length"
    assert prompt == found["text"] or not isinstance(prompt, str)


def test_raw_logprobs_whatever_the_sampling(http: httpx.Client) -> None:
    """The same forced token, scored at other temperatures and filters: one value."""
    forced = ids_of(http, " Paris")
    assert len(forced) == 1
    values = set()
    for options in (
        {"temperature": 0}, {"temperature": 0.1}, {"temperature": 2, "top_k": 1},
        {"temperature": 1, "top_p": 0.01}, {"min_p": 0.99}, {"presence_penalty": 2},
    ):  # fmt: skip
        answer = complete(
            http, prompt="The capital of France is", max_tokens=1, logprobs=1, seed=1,
            allowed_token_ids=forced, **options,
        )  # fmt: skip
        assert answer["choices"][0]["text"] == " Paris"
        values.add(answer["choices"][0]["logprobs"]["token_logprobs"][0])
    assert len(values) == 1


def test_observing_changes_nothing(http: httpx.Client) -> None:
    body = {"prompt": "The future of AI is", "max_tokens": 20, "seed": 5}
    extras: list[dict[str, Any]] = [
        {}, {"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 2}, {"return_token_ids": True},
        {"n": 2}, {"user": "me"}, {"echo": True},
    ]  # fmt: skip
    texts = set()
    for extra in extras:
        text = complete(http, **body, **extra)["choices"][0]["text"]
        texts.add(text.removeprefix(body["prompt"]) if "echo" in extra else text)
    assert len(texts) == 1


def test_chat(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = strict(http.post("/v1/chat/completions", json=body).text)["choices"][0]
    assert whole["message"]["content"].strip()
    chunks = events(http, "/v1/chat/completions", **body)
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(d["delta"].get("content", "") for d in deltas) == whole["message"]["content"]
    logprobs = [item for d in deltas for item in (d["logprobs"] or {}).get("content", [])]
    assert logprobs == whole["logprobs"]["content"]
    assert deltas[-1]["finish_reason"] == whole["finish_reason"]
    shown = b"".join(bytes(item["bytes"]) for item in logprobs).decode()
    assert shown.startswith(whole["message"]["content"])


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2]}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_structured_answers(http: httpx.Client, stream: bool) -> None:
    def ask(**extra: Any) -> str:
        body = {"prompt": "Answer:", "max_tokens": 60, "seed": 2, **extra}
        found = joined(events(http, **body)) if stream else plain(complete(http, **body))
        return str(found[0]["text"])

    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x", "y"]}}}
    assert json.loads(ask(response_format=form)) in ("x", "y")
    form["json_schema"] = {"name": "a", "schema": SCHEMA}
    found = ask(response_format=form).strip()  # white space is free: it may fill all 60 tokens
    assert re.match(r'\{(\s*$|\s*"city")', found)
    assert ask(response_format={"type": "json_object"}).strip().startswith("{")
    assert ask(structured_outputs={"choice": ["red", "blue"]}) in ("red", "blue")
    assert re.fullmatch(r"\d{3}-\d{2}", ask(structured_outputs={"regex": r"\d{3}-\d{2}"}))


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [({"regex": "[^ ]{5,30}"}, "[^ ]{5,30}"), ({"regex": "[a-zé]{3,8}é"}, "[a-zé]{3,8}é"),
     ({"regex": r"a\nb c\td"}, r"a\nb c\td"), ({"choice": ["日本", "中国"]}, "日本|中国"),
     ({"choice": ["New York City", "Los Angeles"]}, "New York City|Los Angeles"),
     ({"json": {"enum": [f"value number {i}" for i in range(500)]}}, r'"value number \d+"')],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_grammars_mean_the_text_that_is_said(
    http: httpx.Client, wanted: Any, pattern: str, seed: int
) -> None:
    """Spaces, line ends and letters outside ASCII, which a byte-level vocabulary spells otherwise:
    the compiler took these spellings for the text.
    """
    body = {"prompt": "Some words: ", "max_tokens": 40, "seed": seed, "structured_outputs": wanted}
    choice = complete(http, **body)["choices"][0]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "wanted",
    [{"regex": "(["}, {"json": {"type": "nonsense"}}, {"grammar": "root := ?"}, {"regex": "(a"},
     # Parsed at vLLM's door, refused by the compiler in the engine, which ended it.
     {"json": {"type": "string", "minLength": -5}}, {"json": {"$ref": "#"}},
     # XGrammar would leave these out, and answer as if they had not been asked for.
     {"json": {"type": "array", "uniqueItems": True}}, {"json": {"not": {"type": "string"}}},
     # Nothing can be said at all.
     {"grammar": "root ::= root"}, {"regex": "[^\\s\\S]"}],
    ids=str,
)  # fmt: skip
def test_grammars_that_are_none(http: httpx.Client, wanted: Any) -> None:
    for stream in (False, True):
        body = {"prompt": "a", "structured_outputs": wanted, "stream": stream}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "structured_outputs"
    assert complete(http, prompt="a", max_tokens=1)["choices"]


MANY = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", [{"json": MANY}, {"regex": "([a-z]{1,100}Q)*" * 3000}], ids=list)
def test_a_grammar_that_gives_up(
    http: httpx.Client, server: Running, wanted: Any, stream: bool
) -> None:
    """llguidance takes both and reaches a limit of its own a token later. At the second one vLLM
    then lets the answer end with "stop", as if it were whole.
    """
    body = {"prompt": "a", "max_tokens": 40, "seed": 1, "structured_outputs": wanted}
    answer = http.post("/v1/completions", json={**body, "stream": stream})
    if answer.status_code == 200:  # the error comes after the first tokens have left
        assert stream
        last = answer.text.removesuffix("data: [DONE]\n\n").strip().split("data: ")[-1]
        error = json.loads(last)["error"]
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert error["param"] == "structured_outputs"
    assert "broke off" in error["message"]
    assert "LLMatcher error" not in server.log  # with which vLLM logs all of the user's grammar


def test_a_grammar_that_takes_for_ever(http: httpx.Client) -> None:
    """It is given up after `max_grammar_s`; meanwhile other structured answers go on."""
    complete(http, prompt="a", structured_outputs={"choice": ["known"]})
    parts = [{"type": "string", "pattern": f"^.*a.{{{i}}}b"} for i in range(30)]
    hostile = {"prompt": "a", "structured_outputs": {"json": {"allOf": parts}}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/v1/completions", json=hostile)
        time.sleep(0.2)
        for _ in range(3):
            answer = complete(http, prompt="a", structured_outputs={"choice": ["known"]})
            assert answer["choices"][0]["text"] == "known"
        assert not waiting.done()
        answer = waiting.result()
    assert answer.status_code == 400
    assert "more than 5 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "other", [{"bad_words": ["x"]}, {"allowed_token_ids": [5]}, {"min_tokens": 4}], ids=str
)
def test_a_grammar_against_other_options(http: httpx.Client, other: Any) -> None:
    body = {"prompt": "a", "max_tokens": 6, "structured_outputs": {"choice": ["x"]}, **other}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "structured_outputs"


def test_tools(http: httpx.Client) -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    body = {
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "tools": [{"type": "function", "function": function}], "max_tokens": 80, "seed": 1,
    }  # fmt: skip
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        answer = http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]
        assert found["finish_reason"] == reason
        call = found["message"]["tool_calls"][0]
        assert call["function"]["name"] == "weather"
        assert set(json.loads(call["function"]["arguments"])) == {"city", "n"}
    refused = http.post("/v1/chat/completions", json={**body, "tool_choice": "auto"})
    assert refused.json()["error"]["param"] == "tool_choice"


def test_many_texts_tokenized_at_once(http: httpx.Client, server: Running) -> None:
    texts = [f"{i} " * (1 + i * 7 % 900) for i in range(64)]

    def count(text: str) -> int:
        return int(httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["count"])

    alone = [count(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(count, texts)) == alone


def _running(http: httpx.Client) -> int:
    return int(http.get("/health").json()["running"])


def _leave(server: Running, after_s: float, **body: Any) -> None:
    url = httpx.URL(server.url)
    raw = json.dumps({"max_tokens": 2000, "seed": 1, "ignore_eos": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        time.sleep(after_s)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": "a", "n": 4},
        {"prompt": ["a"] * 8, "stream": True}, {"prompt": "a " * 900, "echo": True, "logprobs": 1},
    ],
    ids=["plain", "stream", "n=4", "list", "echo"],
)  # fmt: skip
def test_clients_that_leave(server: Running, http: httpx.Client, body: dict[str, Any]) -> None:
    probe = {"prompt": "The future of AI is", "seed": 8, "max_tokens": 12, "logprobs": 1}
    alone = complete(http, **probe)["choices"]
    thread = threading.Thread(target=_leave, args=(server, 0.5), kwargs=body)
    thread.start()
    assert until(lambda: _running(http) > 0, 5), "nothing had started: the test is void"
    assert complete(http, **probe)["choices"] == alone
    thread.join()
    assert until(lambda: _running(http) == 0, 1.5)


def _rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def _storm(server: Running, http: httpx.Client, count: int) -> int:
    """Requests whose clients leave within 5 ms; the resident memory afterwards, in KiB."""
    for index in range(count):
        _leave(server, index % 6 / 1000, prompt="word " * 500, stream=index % 2 == 0)
    assert until(lambda: _running(http) == 0, 30)
    return sum(_rss_kib(pid) for pid in (server.process.pid, *_cores(server.process.pid)))


def test_leaving_while_being_added(server: Running, http: httpx.Client) -> None:
    _storm(server, http, 60)
    assert complete(http, prompt="a", max_tokens=1)["choices"]


@pytest.mark.slow
def test_leaving_leaves_nothing_behind(tmp_path: Path) -> None:
    """A KV cache that is small, so that pages of it touched for the first time don't count."""
    small = ("--num-gpu-blocks-override", "80", "--max-model-len", "1024")
    with serving(tmp_path / "log", *small) as running, httpx.Client(base_url=running.url) as http:
        before = _storm(running, http, 200)
        assert _storm(running, http, 1000) - before < 32 * 1024


def _cores(pid: int) -> list[int]:
    """The processes below the server that hold the engine."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()[1:]]
    below, found = [pid], []
    while below:
        parent = below.pop()
        children = [child for child, above in pairs if above == parent]
        found += children
        below += children
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_is_gone(tmp_path: Path, sign: signal.Signals) -> None:
    with (
        serving(tmp_path / "log", "--stall-timeout-s", "2") as running,
        httpx.Client(base_url=running.url) as http,
    ):
        cores = _cores(running.process.pid)
        if not cores:
            pytest.skip("the engine shares the server's process: it dies with it")
        found: list[dict[str, Any]] = []

        def read() -> None:
            with httpx.Client(base_url=running.url, timeout=60) as other:
                body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
                text = other.post("/v1/completions", json=body).text
                # Killed before the first output it is a 503, else a stream with an error event.
                found.extend(
                    strict(block.removeprefix("data: "))
                    for block in text.split("\n\n")
                    if block not in ("", "data: [DONE]")
                )

        thread = threading.Thread(target=read)
        thread.start()
        assert until(lambda: _running(http) == 1, 10)
        for core in cores:
            os.kill(core, sign)
        begun = time.monotonic()
        assert until(lambda: http.get("/ready").status_code == 503, 8)
        assert time.monotonic() - begun < 6  # step_timeout_s is 4
        thread.join(10)
        assert "error" in found[-1]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        if sign == signal.SIGSTOP:
            for core in cores:
                os.kill(core, signal.SIGCONT)
            assert until(lambda: http.get("/ready").status_code == 200, 20)
            assert complete(http, prompt="a", max_tokens=2)["choices"]
        else:
            assert running.process.wait(30) == 1


@pytest.mark.slow
def test_the_drain(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--drain-s", "20") as running:
        answers: list[list[dict[str, Any]]] = []

        def read() -> None:
            with httpx.Client(base_url=running.url, timeout=60) as other:
                answers.append(events(other, prompt="a", max_tokens=200, ignore_eos=True))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=running.url, timeout=60) as http:
            assert until(lambda: _running(http) == 4, 30)
        children = _cores(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert running.process.wait(40) == 0
        assert len(answers) == 4
        assert not any("error" in chunk for chunks in answers for chunk in chunks)
        assert _gone(children), "a child was left"


def _gone(pids: list[int]) -> bool:
    return until(lambda: not any(_alive(pid) for pid in pids), 15)


def _alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_health_answers_under_load(server: Running, http: httpx.Client) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            body = {"prompt": ["a " * 50] * 16, "max_tokens": 16, "n": 2}
            httpx.post(server.url + "/v1/completions", json=body, timeout=120)

    thread = threading.Thread(target=load)
    thread.start()
    assert until(lambda: _running(http) > 0, 10)
    try:
        assert all(http.get("/health", timeout=5).status_code == 200 for _ in range(50))
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_killed_server_leaves_no_orphan(tmp_path: Path) -> None:
    body = {"prompt": "The future of AI is", "seed": 4, "max_tokens": 8, "logprobs": 1}
    found = []
    for name in ("first", "second"):
        with serving(tmp_path / name) as running:
            with httpx.Client(base_url=running.url, timeout=60) as http:
                found.append(complete(http, **body)["choices"])
            children = _cores(running.process.pid)
            running.process.kill()
            running.process.wait(10)
            assert _gone(children), "an orphan is left"
    assert found[0] == found[1], "a restart at once gives the same answer"
