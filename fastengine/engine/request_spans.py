"""RequestSpans: a finished request as spans, made from the times the engine has kept of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastengine.config import EngineConfig
from fastengine.engine.request_state import RequestState
from fastengine.protocol.outputs import EngineError

if TYPE_CHECKING:
    from fastengine.observability.tracing import Attributes, Tracer

NS = 1_000_000_000


class RequestSpans:
    """Observes finished requests: each yields ``queue``, ``prefill`` and ``decode``, as far as it came.

    Their parent is the request's own; without one (it came from a program, not over HTTP) it is a span
    ``request`` of their own. An error is told by the last of them.
    """

    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    @classmethod
    def of(cls, config: EngineConfig, instance: str) -> RequestSpans | None:
        """None without ``--otlp-endpoint``."""
        endpoint = config.observability.otlp_endpoint
        if endpoint is None:
            return None
        from fastengine.observability.tracing import Tracer  # loads an extra's packages

        return cls(Tracer(endpoint, instance=instance, process="engine"))

    def close(self) -> None:
        self._tracer.close()

    def finished(self, request: RequestState, error: EngineError | None) -> None:
        now = time.monotonic()
        epoch_ns = time.time_ns() - int(now * NS)
        moments = [request.arrived_at, request.started_at, request.first_token_at]
        reached = [epoch_ns + int(moment * NS) for moment in moments if moment is not None]
        ends = [*reached[1:], epoch_ns + int(now * NS)]
        message = None if error is None else error.message
        about: Attributes = {"request_id": request.request_id, "prompt_tokens": request.num_prompt}
        outcome: Attributes = {
            **about,
            "cached_tokens": request.num_cached or 0,
            "output_tokens": len(request.tokens) - request.num_prompt,
            "finish_reason": request.finish_reason or "",
            "preemptions": request.num_preemptions,
        }
        parent, root = request.request.trace_parent, None
        if not parent:
            root = self._tracer.start("request", "", reached[0])
            parent = root.trace_parent
        spans = list(zip(("queue", "prefill", "decode"), reached, ends, strict=False))
        for name, start_ns, end_ns in spans[:-1]:
            self._tracer.record(name, parent, start_ns, end_ns, about)
        name, start_ns, end_ns = spans[-1]
        self._tracer.record(name, parent, start_ns, end_ns, outcome, message)
        if root is not None:
            root.end(end_ns, outcome, message)
