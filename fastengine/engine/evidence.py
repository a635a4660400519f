"""Evidence: what the engine remembers of requests for logs, dumps and crash reports.

It observes the requests that finish and keeps nothing unless a flag asks for it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastengine.config import EngineConfig
from fastengine.engine.core import EngineCore
from fastengine.engine.request_state import RequestState, Tokens
from fastengine.observability.crash_dump import write_crash_dump
from fastengine.observability.recent import Recent
from fastengine.observability.request_log import RequestDumper, RequestRecord
from fastengine.protocol.outputs import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Finished:
    request: RequestState
    error: EngineError | None
    ended_at: float  # time.monotonic()
    weight_version: str

    def record(self) -> RequestRecord:
        return record_of(self.request, self.request.tokens, self.ended_at, self.weight_version, self.error)


class Evidence:
    """Observer of one engine's finished requests. Used by the engine loop only."""

    def __init__(self, config: EngineConfig, instance: str):
        """Makes ``--crash-dump-dir``; raises OSError when it can't."""
        settings = config.observability
        self._config = config
        self._instance = instance
        self._log_lines = settings.log_requests
        self._directory = Path(settings.crash_dump_dir) if settings.crash_dump_dir else None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._dumper = RequestDumper(self._directory, instance, settings.dump_requests) if self._directory and settings.dump_requests else None
        self._kept: Recent[_Finished] = Recent()
        self._core: EngineCore | None = None

    def watch(self, core: EngineCore) -> None:
        self._core = core
        if self._log_lines or self._directory is not None:
            core.observe_finished(self._finished)

    def _finished(self, request: RequestState, error: EngineError | None) -> None:
        assert self._core is not None
        finished = _Finished(request, error, time.monotonic(), self._core.weight_version)
        if self._log_lines:
            logger.info("finished %s", json.dumps(log_line(finished)))
        if self._directory is not None:
            self._kept.add(finished, len(request.tokens), finished.ended_at)
        if self._dumper is not None:
            self._dumper.add(finished.record)

    def crashed(self, what: str, reason: str, tracebacks: Mapping[str, str]) -> None:
        """Write the report of a crash, if ``--crash-dump-dir`` asks for it. Call it before requests are taken back."""
        if self._directory is not None:
            write_crash_dump(self._directory, self._instance, what, reason, self._config.flat(), tracebacks, self._records())

    def _records(self) -> Iterator[RequestRecord]:
        now = time.monotonic()
        for finished in self._kept.since(now):
            yield finished.record()
        if self._core is not None:
            for request, tokens in self._core.live_requests():
                yield record_of(request, tokens, now, self._core.weight_version, None)

    def close(self) -> None:
        if self._dumper is not None:
            self._dumper.close()


def record_of(request: RequestState, tokens: Tokens, now: float, weight_version: str, error: EngineError | None) -> RequestRecord:
    """The record of ``request`` as it stands at ``now`` (time.monotonic()), ``tokens`` being its prompt and output."""
    asked = request.request
    return RequestRecord(
        request_id=request.request_id,
        parent_id=asked.parent_id,
        index=asked.index,
        client_index=asked.client_index,
        state=request.status.value,
        finish_reason=request.finish_reason,
        error=error,
        prompt_token_ids=tokens[: request.num_prompt].tolist(),
        output_token_ids=tokens[request.num_prompt :].tolist(),
        sampling=asked.sampling,
        seed=request.seed,
        priority=asked.priority,
        timeout_s=asked.timeout_s,
        cache_salt=asked.cache_salt,
        arrived_at_s=round(time.time() - (time.monotonic() - request.arrived_at), 6),
        queue_s=_seconds(request.started_at, request.arrived_at),
        first_token_s=_seconds(request.first_token_at, request.arrived_at),
        total_s=round(now - request.arrived_at, 6),
        num_cached_tokens=request.num_cached or 0,
        num_preemptions=request.num_preemptions,
        weight_version=weight_version,
    )


def _seconds(moment: float | None, since: float) -> float | None:
    return None if moment is None else round(moment - since, 6)


def log_line(finished: _Finished) -> dict[str, object]:
    """What ``--log-requests`` says of a request: names, counts and times, no content."""
    request = finished.request
    return {
        "request_id": request.request_id,
        "client": request.request.client_index,
        "finish_reason": request.finish_reason,
        "error": None if finished.error is None else finished.error.message,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.num_cached or 0,
        "output_tokens": len(request.tokens) - request.num_prompt,
        "queue_s": _seconds(request.started_at, request.arrived_at),
        "ttft_s": _seconds(request.first_token_at, request.arrived_at),
        "e2e_s": _seconds(finished.ended_at, request.arrived_at),
        "preemptions": request.num_preemptions,
        "weight_version": finished.weight_version,
    }
