"""Prometheus metrics of the HTTP side, in a registry of the application's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """All counters of one application; `render()` is the exposition text.

    Labels are routes of ours and fixed words only, never a client's text: cardinality is bounded.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_requests(self.registry)
        self._add_tokens(self.registry)
        self._add_state(self.registry)

    def _add_requests(self, registry: CollectorRegistry) -> None:
        """What came in and how long it took."""
        self.requests = Counter(
            "samebits_requests", "Answered requests", ["route", "status"], registry=registry
        )
        self.refusals = Counter(
            "samebits_refusals", "Refused requests by reason", ["reason"], registry=registry
        )
        self.gone = Counter(
            "samebits_clients_gone", "Requests whose client left early", registry=registry
        )
        self.duration = Histogram(
            "samebits_request_seconds",
            "Time from first byte of the request to last of the answer",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.open_requests = Gauge(
            "samebits_open_requests", "Requests being answered", registry=registry
        )

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        """What was computed, and how fast."""
        self.first_token = Histogram(
            "samebits_time_to_first_token_seconds",
            "Time from the request to its first token, of streams and of answers of one token",
            buckets=SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "samebits_time_per_token_seconds",
            "Mean time per answer token after the first output, per streamed choice",
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "samebits_prompt_tokens", "Prompt tokens of answered requests", registry=registry
        )
        self.cached_tokens = Counter(
            "samebits_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.answer_tokens = Counter(
            "samebits_answer_tokens", "Generated tokens", registry=registry
        )

    def _add_state(self, registry: CollectorRegistry) -> None:
        """The engine, and what it is."""
        self.in_engine = Gauge(
            "samebits_choices_in_engine", "Choices running or waiting", registry=registry
        )
        self.ready = Gauge(
            "samebits_ready", "1: the engine is verified and stepping", registry=registry
        )
        self.check = Gauge(
            "samebits_self_check",
            "1: bit-equality checks of the op passed on every rank",
            ["op"],
            registry=registry,
        )
        self.fingerprint = Info(
            "samebits_fingerprint", "What decides the bits of answers", registry=registry
        )

    def render(self) -> bytes:
        """The exposition text of this application."""
        return generate_latest(self.registry)
