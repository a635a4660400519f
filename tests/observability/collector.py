"""A collector of OTLP spans over HTTP, in the test's process."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server import wait_until

ERROR = 2  # a span's status code


@dataclass(frozen=True)
class CollectedSpan:
    name: str
    process: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


class Collector:
    """Takes spans at ``url`` until closed."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.add(self.path)
                collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: a test's output is its own."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _plain(resource.resource.attributes)
            assert about["service.name"] == "fastengine"
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.append(
                    CollectedSpan(
                        name=span.name,
                        process=about["fastengine.process"],
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes=_plain(span.attributes),
                        error=span.status.message if span.status.code == ERROR else None,
                    )
                )

    def of(self, request_id: str) -> dict[str, CollectedSpan]:
        """What has come of one request, by the spans' names."""
        return {span.name: span for span in list(self.spans) if span.attributes.get("request_id") == request_id}

    def wait(self, count: int, timeout_s: float = 30.0) -> None:
        wait_until(lambda: len(self.spans) >= count, timeout_s, f"{count} spans; there are {[s.name for s in self.spans]}")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
