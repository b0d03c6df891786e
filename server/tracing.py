"""OpenTelemetry traces, when an endpoint is set. Without one, spans cost nothing.

The packages come with vLLM; a set endpoint without them stops the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Scope

    from config.settings import Settings


class Span:
    """One request's span; does nothing without a tracer."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, route: str, status: int | None) -> None:
        """Name the span by its route, and note the status."""
        if self._span is not None:
            self._span.update_name(route)
            self._span.set_attribute("http.route", route)
            self._span.set_attribute("http.response.status_code", status or 500)


def open_tracer(settings: Settings, exporter: Any = None) -> Any:
    """A tracer that exports to `otlp_endpoint` (OTLP over HTTP), or None. Raises ImportError."""
    if settings.otlp_endpoint is None and exporter is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "samebits"}))
    exporter = exporter or OTLPSpanExporter(endpoint=settings.otlp_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


@contextmanager
def span(request_id: str, scope: Scope) -> Iterator[Span]:
    """A server span around one request, child of the caller's `traceparent` if it sent one."""
    provider = getattr(scope["app"].state.service, "tracer", None) if "app" in scope else None
    if provider is None:
        yield Span(None)
        return
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    tracer = provider.get_tracer("samebits")
    attributes = {"http.request.method": scope["method"], "samebits.request_id": request_id}
    with tracer.start_as_current_span(
        "request", context=extract(carrier), kind=SpanKind.SERVER, attributes=attributes
    ) as current:
        yield Span(current)
