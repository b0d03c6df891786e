"""The served OpenAPI document, and schemathesis let loose on it: nothing may be a server error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.openapi import BODIES
from server.protocol_chat import ChatRequest
from server.protocol_completions import CompletionRequest
from tests.server.live import Live, serving, strict

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (dev)")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402

EXAMPLES = 40


@pytest.fixture(scope="module")
def target() -> Iterator[Live]:
    with serving(max_n=4, max_choices=8) as live:
        yield live


PATHS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"), ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/ping"), ("POST", "/v1/responses"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_server_errors(target: Live, method: str, path: str, mode: str) -> None:
    document = schemathesis.openapi.from_url(target.url + "/openapi.json")
    operation = document[path][method]
    kind = schemathesis.GenerationMode(mode)
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=kind))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=20)
        statuses.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        if "json" in answer.headers["content-type"][0] and method != "HEAD" and answer.text:
            found = strict(answer.text)
            assert answer.status_code < 400 or set(found["error"]) >= {"message", "param"}

    try:
        check()
    except Unsatisfiable:
        pytest.skip("nothing can be wrong in a request without parameters")
    assert statuses
    if path == "/v1/completions" and mode == "negative":
        assert 400 in statuses


def test_the_document_names_every_body_field(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    for path, model in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rsplit("/", 1)[1]
        shown = document["components"]["schemas"][name]
        assert shown["properties"].keys() == model.model_fields.keys()
        assert not shown["additionalProperties"]
        assert "default" in document["paths"][path]["post"]["responses"]
    assert document["paths"].keys() >= {"/v1/models", "/health", "/ready", "/version", "/metrics"}


def test_the_written_reference_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    for model in (CompletionRequest, ChatRequest):
        missing = [name for name in model.model_fields if f"`{name}`" not in text]
        assert not missing
