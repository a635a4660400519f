"""Lifecycle: the one way a request ends, whatever state it is in and whoever ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastengine.engine.outputs import OutputCollector
from fastengine.engine.pipeline import Pipeline
from fastengine.engine.request_state import RequestState, RequestStatus, RequestTable
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.slots import SlotTable
from fastengine.engine.stop_tokens import StopTokens
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.outputs import FINISH_ABORT, FINISH_ERROR, EngineError, FinishReason, TokenOutput

# Told of every request that has finished, with what went wrong if something did.
FinishObserver = Callable[[RequestState, EngineError | None], None]


class Lifecycle:
    """Owns the transition to FINISHED; table, slots, blocks, metrics and outputs follow from it."""

    def __init__(
        self,
        table: RequestTable,
        slots: SlotTable,
        resources: ResourceManager,
        pipeline: Pipeline,
        outputs: OutputCollector,
        stop_tokens: StopTokens,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ):
        self._table = table
        self._slots = slots
        self._resources = resources
        self._pipeline = pipeline
        self._outputs = outputs
        self._stop_tokens = stop_tokens
        self._metrics = metrics
        self._clock = clock
        self.observers: list[FinishObserver] = []
        self.weight_version = "default"

    def begin(self, request: RequestState) -> None:
        self._table.add(request)
        self._stop_tokens.count(request, 1)

    def num_output_tokens(self, request: RequestState) -> int:
        return self._slots.num_known_of(request) - request.num_prompt

    def end(self, request: RequestState, reason: FinishReason, error: EngineError | None = None) -> int:
        """Move ``request`` to FINISHED and give back what it held; returns its number of output tokens.

        Tells its client nothing: that is the caller's part.
        """
        num_output = self.num_output_tokens(request)
        if request.slot >= 0:
            self._pipeline.mark_dead(request.slot)
        self._resources.release(request)
        request.transition(RequestStatus.FINISHED)
        request.finish_reason = reason
        self._table.remove(request)
        self._stop_tokens.count(request, -1)
        self._measure(request, num_output)
        for observer in self.observers:
            observer(request, error)
        return num_output

    def abort(self, request: RequestState, *, silent: bool = False, reason: Literal["abort", "stop"] = FINISH_ABORT) -> int:
        """End with ``reason``; the client keeps the tokens it has. Returns the number of output tokens."""
        num_output = self.end(request, reason)
        if not silent:
            output = TokenOutput(
                handle=request.request.handle, finish_reason=reason, num_output_tokens=num_output, weight_version=self.weight_version
            )
            self._outputs.add_event(request.request.client_index, output)
        return num_output

    def abort_all(self) -> None:
        for request in list(self._table):
            self.abort(request)

    def fail(self, request: RequestState, error: EngineError) -> None:
        """End with ``error``."""
        num_output = self.end(request, FINISH_ERROR, error)
        output = TokenOutput(
            handle=request.request.handle, finish_reason=FINISH_ERROR, num_output_tokens=num_output, weight_version=self.weight_version, error=error
        )
        self._outputs.add_event(request.request.client_index, output)

    def _measure(self, request: RequestState, num_output: int) -> None:
        assert request.finish_reason is not None
        now = self._clock()
        histograms = self._metrics.histograms
        self._metrics.finished[request.finish_reason] += 1
        self._metrics.e2e_latency[request.finish_reason].observe(now - request.arrived_at)
        histograms["request_prompt_tokens"].observe(request.num_prompt)
        histograms["request_generation_tokens"].observe(num_output)
        if request.started_at is not None:
            histograms["request_inference_time_seconds"].observe(now - request.started_at)
        if request.first_token_at is not None:
            histograms["request_decode_time_seconds"].observe(now - request.first_token_at)
