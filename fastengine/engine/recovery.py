"""CrashRecovery: after the workers died, find out whether a request kills them, at the expense of no other.

Requests of the steps that were in flight are *suspects*. Once the workers are back, suspects run one at a
time, alone in their steps, until each has sampled a token: that costs little, since all of their tokens must
be computed again anyway. Whoever is in flight in a second crash in a row was alone in it, and is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fastengine.engine.lifecycle import Lifecycle
from fastengine.engine.pipeline import InFlightStep
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.slots import SlotTable
from fastengine.protocol.outputs import EngineError

MAX_STRIKES = 2


@dataclass
class CrashReport:
    """What a crash meant for requests: ids that will be recomputed, ids under suspicion, ids that ended."""

    requeued: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class CrashRecovery:
    def __init__(self, slots: SlotTable, lifecycle: Lifecycle):
        self._slots = slots
        self._lifecycle = lifecycle
        self._suspects: dict[str, RequestState] = {}

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def take_part(self, steps: Iterable[InFlightStep]) -> list[RequestState]:
        """Requests that still live and were in flight in ``steps``; to be called before they leave their slots."""
        found: dict[str, RequestState] = {}
        for step in steps:
            slots = [*step.batch.slots.tolist(), *(slot for slot, _ in step.chunked)]
            for slot in slots:
                request = self._slots.requests[slot]
                if slot not in step.dead and request is not None:
                    found[request.request_id] = request
        return list(found.values())

    def accuse(self, participants: list[RequestState], report: CrashReport) -> None:
        """Each of ``participants``, preempted by now, took part in a crash."""
        for request in participants:
            request.strikes += 1
            if request.strikes < MAX_STRIKES:
                self._suspects[request.request_id] = request
                continue
            self._suspects.pop(request.request_id, None)
            report.failed.append(request.request_id)
            message = "the workers crashed twice in a row while they computed this request; it was not tried again"
            self._lifecycle.fail(request, EngineError(500, message))
        report.suspects = list(self._suspects)

    def clear(self, request: RequestState) -> None:
        """``request`` has sampled a token: it does not kill workers."""
        request.strikes = 0
        self._suspects.pop(request.request_id, None)

    def next_suspect(self) -> RequestState | None:
        """The suspect to run next: the one that runs already, or else the first that waits."""
        for request_id, request in list(self._suspects.items()):
            if request.is_finished:
                del self._suspects[request_id]
        running = [request for request in self._suspects.values() if request.status is RequestStatus.RUNNING]
        return next(iter(running or self._suspects.values()), None)
