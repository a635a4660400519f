"""Tracer: spans of one process, exported in batches to an OpenTelemetry collector by a thread of its own.

Needs the packages of the extra ``otel``: import it only when ``--otlp-endpoint`` is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanContext, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACES_PATH = "/v1/traces"
# A collector that does not answer must not hold up a server that ends.
EXPORT_TIMEOUT_S = 5
Attributes = Mapping[str, str | int | float | bool]


def traces_url(endpoint: str) -> str:
    """Where spans are sent: a bare ``http://host:port`` gets OTLP's own path."""
    return endpoint.rstrip("/") + TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint


class Tracer:
    """Makes spans. Times are ns since the epoch; a parent is a W3C ``traceparent``, or empty for none.

    Below a parent that is not sampled nothing is recorded.
    """

    def __init__(self, endpoint: str, *, instance: str, process: str):
        about = {"service.name": "fastengine", "service.instance.id": instance, "fastengine.process": process}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fastengine")
        self._propagator = TraceContextTextMapPropagator()

    def normalized(self, trace_parent: str) -> str:
        """``trace_parent`` in the standard's present form; empty if it is none."""
        found = get_current_span(self._context(trace_parent)).get_span_context()
        return _trace_parent(found) if found.is_valid else ""

    def start(self, name: str, parent: str, start_ns: int) -> OpenSpan:
        return OpenSpan(self._tracer.start_span(name, context=self._context(parent), start_time=start_ns))

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Attributes, error: str | None = None) -> None:
        """A span that is over already; ``error`` says what went wrong."""
        self.start(name, parent, start_ns).end(end_ns, attributes, error)

    def close(self) -> None:
        """Export what is left and end the thread."""
        self._provider.shutdown()

    def _context(self, trace_parent: str) -> Context:
        return self._propagator.extract({"traceparent": trace_parent}, Context())


class OpenSpan:
    """A span that others can have as their parent before it is over."""

    def __init__(self, span: Span):
        self._span = span

    @property
    def trace_parent(self) -> str:
        return _trace_parent(self._span.get_span_context())

    def end(self, end_ns: int, attributes: Attributes, error: str | None = None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


def _trace_parent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
