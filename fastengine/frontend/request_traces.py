"""What an API process tells of a request in spans: ``preprocess`` before the engine has it, ``postprocess`` after.

Both are children of the client's ``traceparent``, as are the engine's; a request without one gets a span
``request`` of its own, which is then the parent of all.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastengine.config import EngineConfig

if TYPE_CHECKING:
    from fastengine.observability.tracing import Tracer

# Of the HTTP request that the current task answers: its traceparent header, and when it came (ns since the epoch).
_incoming: ContextVar[tuple[str, int] | None] = ContextVar("incoming", default=None)


class TraceHeaders:
    """ASGI middleware that notes the moment and the ``traceparent`` of every HTTP request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _incoming.set((Headers(scope=scope).get("traceparent", ""), time.time_ns()))
        await self._app(scope, receive, send)


class RequestTraces:
    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    @classmethod
    def of(cls, config: EngineConfig, instance: str, client_index: int) -> RequestTraces | None:
        """None without ``--otlp-endpoint``."""
        endpoint = config.observability.otlp_endpoint
        if endpoint is None:
            return None
        from fastengine.observability.tracing import Tracer  # loads an extra's packages

        return cls(Tracer(endpoint, instance=instance, process=f"api-{client_index}"))

    def begin(self, request_id: str) -> RequestTrace:
        """The trace of what the current HTTP request asks of the engine under ``request_id``."""
        header, received_ns = _incoming.get() or ("", time.time_ns())
        return RequestTrace(self._tracer, request_id, self._tracer.normalized(header), received_ns)

    def close(self) -> None:
        self._tracer.close()


class RequestTrace:
    """One generation's. ``trace_parent`` is what the engine's spans are children of."""

    def __init__(self, tracer: Tracer, request_id: str, parent: str, received_ns: int):
        self._tracer = tracer
        self._about = {"request_id": request_id}
        self._received_ns = received_ns
        self._answered_ns: int | None = None
        self._root = None if parent else tracer.start("request", "", received_ns)
        self.trace_parent = self._root.trace_parent if self._root is not None else parent

    def submitted(self, error: str | None = None) -> None:
        """The engine has it; or ``error`` says why not, and this is the end."""
        self._tracer.record("preprocess", self.trace_parent, self._received_ns, time.time_ns(), self._about, error)
        if error is not None:
            self._end_root(error)

    def answered(self) -> None:
        """The last output of the engine is here, or no more is wanted."""
        self._answered_ns = time.time_ns()

    def ended(self, error: str | None) -> None:
        """The reply has been written, or given up because of ``error``."""
        if self._answered_ns is not None:
            self._tracer.record("postprocess", self.trace_parent, self._answered_ns, time.time_ns(), self._about, error)
        self._end_root(error)

    def _end_root(self, error: str | None) -> None:
        if self._root is not None:
            self._root.end(time.time_ns(), self._about, error)
