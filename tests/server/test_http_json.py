"""Raw bodies: what is not quite JSON, too large, too deep; error bodies are valid JSON
themselves.
"""

from __future__ import annotations

import socket
import time

import pytest

from tests.server.live import Live, serving, strict

FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e400"])
@pytest.mark.parametrize("field", FIELDS)
def test_numbers_that_are_none(live: Live, field: str, number: str) -> None:
    for body in (f'{{"prompt": "a", "{field}": {number}}}', f'{{"prompt": "a", "x": [{number}]}}'):
        answer = live.raw(body)
        assert answer.status_code == 400
        error = strict(answer.text)["error"]
        assert error["param"] in (field, "x[0]")
        assert "finite" in error["message"]
    assert live.raw(f'{{"prompt": "a", "{field}": "{number}"}}').status_code == 400
    assert live.complete(prompt="a", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nope", b"[]", b"5", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "a",}',
        b'{"prompt": "\xff"}', b'{"prompt": "a"} x', b"{'prompt': 'a'}", b'{"prompt": "a\n"}',
        b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}",
        b'{"prompt": "a", "n": 01}', b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "metadata": {"a": 1, "a": 2}}',
        b'{"prompt": "\\ud800"}', b'{"prompt": ["a", "b\\udfff"]}', b'{"prompt":"a","\\ud800":1}',
        b'{"prompt": "a", "stop": "\\ud83d"}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_json(live: Live, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = live.raw(body, path)
        assert answer.status_code == 400, answer.text
        error = strict(answer.text)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]


def test_pairs_of_surrogates_are_text(live: Live) -> None:
    answer = live.raw(b'{"prompt": "\\ud83d\\ude42", "echo": true, "max_tokens": 0}')
    assert strict(answer.text)["choices"][0]["text"] == "\U0001f642"


@pytest.mark.parametrize("depth", [65, 1000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_deep_nesting(live: Live, depth: int, brackets: str) -> None:
    middle = len(brackets) - 1
    deep = brackets[:middle] * depth + "1" + brackets[middle:] * depth
    answer = live.raw(f'{{"prompt": "a", "metadata": {{"m": {deep}}}}}')
    assert answer.status_code == 400
    assert "nested" in strict(answer.text)["error"]["message"]


def test_many_containers(live: Live) -> None:
    answer = live.raw('{"prompt": "a", "metadata": {"m": [' + "[]," * 60_000 + "[]]}}")
    assert answer.status_code == 400
    assert "50000" in answer.text
    answer = live.raw('{"prompt": "a", "max_tokens": 1, "user": "' + "[" * 9_000 + '"}')
    assert answer.status_code == 200


@pytest.mark.parametrize("number", ["1e0999", "1E+400", "9" * 309 + ".0", "-1e309"])
def test_overflow_in_odd_spellings(live: Live, number: str) -> None:
    answer = live.raw(f'{{"prompt": "a", "temperature": {number}}}')
    assert answer.status_code == 400
    assert strict(answer.text)["error"]["param"] == "temperature"
    assert live.raw('{"prompt": "a", "temperature": 1e-400}').status_code == 200


def test_nesting_up_to_the_limit(live: Live) -> None:
    deep = "[" * 62 + "]" * 62
    answer = live.raw(f'{{"prompt": "a", "max_tokens": 1, "metadata": {{"m": {deep}}}}}')
    assert answer.status_code == 200, answer.text


def test_brackets_in_texts_do_not_nest(live: Live) -> None:
    assert live.raw('{"prompt": "' + "[{" * 100 + '", "max_tokens": 1}').status_code == 200


def test_content_types(live: Live) -> None:
    for kind, status in (
        ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415), ("", 415), ("multipart/form-data", 415),
    ):  # fmt: skip
        answer = live.http.post(
            "/v1/completions",
            content=b'{"prompt": "a", "max_tokens": 1}',
            headers={"content-type": kind},
        )
        assert answer.status_code == status
        assert status == 200 or "Content-Type" in strict(answer.text)["error"]["message"]


def test_large_bodies() -> None:
    with serving(max_body_bytes=10_000) as live:
        assert live.raw(b" " * 9_000 + b'{"prompt": "a"}').status_code == 200
        answer = live.raw(b" " * 10_000 + b'{"prompt": "a"}')
        assert answer.status_code == 413
        assert strict(answer.text)["error"]["code"] == "request_too_large"
        chunked = live.http.post(
            "/v1/completions",
            content=iter([b" " * 4_000] * 5),
            headers={"content-type": "application/json"},
        )
        assert chunked.status_code == 413
        started = time.monotonic()
        with socket.create_connection(live.http.base_url.host and _address(live)) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: 99999999999\r\n\r\n"
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - started < 5, "it waited for a body that never came"


def _address(live: Live) -> tuple[str, int]:
    return live.http.base_url.host, live.http.base_url.port or 80


def test_errors_have_the_shape_everywhere(live: Live) -> None:
    for method, path, status in (
        ("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions/", 404), ("POST", "//v1/completions", 404),
        ("POST", "/V1/completions", 404), ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/models/a%00b%0d%0a", 404), ("POST", "/v1/responses", 501),
        ("POST", "/v1/embeddings", 501), ("GET", "/docs", 404),
    ):  # fmt: skip
        answer = live.http.request(method, path)
        assert answer.status_code == status, path
        assert set(strict(answer.text)["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


def test_models(live: Live) -> None:
    listed = live.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["fake", "org/fake-7b"]
    for name in ("fake", "org/fake-7b", "org%2Ffake-7b"):
        assert live.http.get(f"/v1/models/{name}").json()["object"] == "model"


def test_tokenize_and_back(live: Live) -> None:
    text = "Hello world \U0001f642"
    found = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert live.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}).json()
    shown = live.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert shown == "[user]Hello[assistant]"
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"prompt": "a", "x": 1}):
        assert live.post("/tokenize", body).status_code == 400
    for tokens in ([-1], [10**9], ["1"], 5, None, [1.0]):
        assert live.post("/detokenize", {"tokens": tokens}).status_code == 400
