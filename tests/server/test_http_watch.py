"""What operators see: metrics, log lines, traces."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from config.settings import Settings
from server import logs, tracing
from tests.server.fake import FakeEngine
from tests.server.live import Live, serving


def _value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no {name} {labels}")


def test_metrics() -> None:
    with serving() as live:
        live.complete(prompt="Hello world", max_tokens=5, n=2)
        live.events(prompt="Hello", max_tokens=5)
        live.post("/v1/completions", {"prompt": "a", "seed": True})
        live.http.get("/nope/" + "x" * 50)
        answer = live.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.text
    route = "/v1/completions"
    assert _value(text, "samebits_requests_total", route=route, status="200") == 2
    assert _value(text, "samebits_requests_total", route=route, status="400") == 1
    assert _value(text, "samebits_requests_total", route="unmatched", status="404") == 1
    assert _value(text, "samebits_refusals_total", reason="invalid_value") == 1
    assert _value(text, "samebits_time_to_first_token_seconds_count") == 1  # of the stream
    assert _value(text, "samebits_time_per_token_seconds_count") == 1  # of the stream
    assert _value(text, "samebits_answer_tokens_total") == 15
    assert _value(text, "samebits_prompt_tokens_total") == 3
    assert _value(text, "samebits_ready") == 1
    assert _value(text, "samebits_self_check", op="aten::mm") == 1
    assert _value(text, "samebits_fingerprint_info", fingerprint="sb_fake") == 1
    assert _value(text, "vllm_fake") == 1
    assert "xxxx" not in text


def test_a_plain_answer_is_no_first_token() -> None:
    """It comes whole: its time would be counted as that of its first token."""
    with serving() as live:
        live.complete(prompt="Hello", max_tokens=5)
        live.complete(prompt="Hello", max_tokens=1)
        live.events(prompt="Hello", max_tokens=1)
        text = live.http.get("/metrics").text
    assert _value(text, "samebits_time_to_first_token_seconds_count") == 2  # those of one token


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    out = io.StringIO()
    logger = logging.getLogger("samebits")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logs.configure(Settings(log_format="json"))
    logger.handlers[0].stream = out  # type: ignore[attr-defined]
    yield out
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_lines(lines: io.StringIO) -> None:
    with serving(FakeEngine(), api_keys="very-secret-key") as live:
        headers = {"authorization": "Bearer very-secret-key", "x-request-id": "mine-1"}
        live.post("/v1/completions", {"prompt": "a secret prompt"}, headers=headers)
        live.http.get("/v1/models%0d%0aforged?key=other-secret", headers=headers)
        live.engine.fail_after, live.engine.fault = 0, RuntimeError("boom")
        live.post("/v1/completions", {"prompt": "a"}, headers=headers)
    text = lines.getvalue()
    found = [json.loads(line) for line in text.splitlines()]
    access = next(line for line in found if line.get("path") == "/v1/completions")
    assert access["request_id"] == "mine-1"
    assert (access["method"], access["status"], access["route"]) == (
        "POST", 200, "/v1/completions"
    )  # fmt: skip
    assert any("boom" in line.get("exception", "") for line in found)
    assert all({"time", "level", "logger", "message", "request_id"} <= set(line) for line in found)
    assert "secret" not in text


def test_console_lines_can_not_be_forged() -> None:
    record = logging.LogRecord("samebits", 20, "", 0, "a\nb\r%s", ("c",), None)
    assert logs.Console().format(record).endswith("a\\nb\\rc")


def test_traces() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = export.InMemorySpanExporter()
    with serving() as live:
        live.service.tracer = tracing.open_tracer(Settings(), exporter)
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        live.http.get("/v1/models", headers={"traceparent": parent})
        deadline = time.monotonic() + 10  # a span ends after its answer has left
        while not (spans := exporter.get_finished_spans()) and time.monotonic() < deadline:
            live.service.tracer.force_flush()
    assert [span.name for span in spans] == ["/v1/models"]
    assert spans[0].attributes["http.response.status_code"] == 200
    assert format(spans[0].context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert tracing.open_tracer(Settings()) is None


def test_unknown_fields_when_not_strict(lines: io.StringIO) -> None:
    with serving(strict=False) as live:
        assert live.complete(prompt="a", sede=5, max_tokens=1)["choices"]
        answer = live.post("/v1/completions", {"prompt": "a", "use_beam_search": True})
        assert answer.status_code == 400, "what changes the answer is refused even so"
    assert "did you mean seed?" in lines.getvalue()


def test_version_and_health(live: Live) -> None:
    assert live.http.get("/version").json()["system_fingerprint"] == "sb_fake"
    shown = live.http.get("/health").json()
    assert (shown["status"], shown["device"], shown["determinism"]) == ("ok", "cpu", "on")
    assert live.http.head("/health").status_code == 200
    assert live.http.get("/ping").status_code == 200
