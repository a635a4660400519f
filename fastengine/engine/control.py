"""ControlPlane: operators' commands, answered between two steps and only when what they say is true.

Three kinds:

* answered at once from the engine's state: is_paused, abort_requests, flush_cache, server_info, metrics
* tools that need the workers and change no state: checksum, profile, log_level, prepare_grammar. Any number at a time.
* state changes: pause, resume, weight updates, sleep, wakeup. One worker operation of these at a time;
  those that come while it runs are taken up after it, in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastengine.engine.lifecycle import Lifecycle
from fastengine.engine.request_state import RequestState, RequestTable
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.run_state import Mode, RunState
from fastengine.engine.worker_commands import Replies, WorkerCommands, lost_replies
from fastengine.engine.worker_operations import ControlError, Operation, Progress, Result, Send, WorkerOperations
from fastengine.protocol.control import (
    AbortRequests,
    ControlCommand,
    ControlRequest,
    ControlResponse,
    FlushCache,
    GetMetrics,
    GetServerInfo,
    IsPaused,
    Pause,
    PrepareGrammar,
    Profile,
    Resume,
    SetLogLevel,
    Sleep,
    UpdateWeights,
    UpdateWeightsFromTensors,
    Wakeup,
    WeightsChecksum,
)
from fastengine.protocol.outputs import EngineError

logger = logging.getLogger(__name__)

STATE_CHANGES = (Pause, Resume, UpdateWeights, UpdateWeightsFromTensors, Sleep, Wakeup)
# Worker operations whose command names no time of its own.
DEFAULT_TIMEOUT_S = 60.0
# Of a command without a time of its own that waits for another to end.
QUICK_PATIENCE_S = 8.0


@dataclass(eq=False)
class _Running:
    """A worker operation under way. ``request`` None: the engine's own, nobody is answered."""

    request: ControlRequest | None
    operation: Operation
    progress: Progress
    deadline: float
    exclusive: bool
    waits_for_stop: bool = False
    answered: bool = False

    @property
    def may_expire(self) -> bool:
        """A 504 says that nothing has changed: past the point of no return the answer is late, but true."""
        return self.request is not None and not self.progress.expired and not self.progress.is_final


@dataclass(eq=False)
class _PendingPause:
    request: ControlRequest
    deadline: float
    drains: bool


@dataclass(eq=False)
class _Deferred:
    """A change of state that waits for another to end."""

    request: ControlRequest
    deadline: float


@dataclass
class ControlHooks:
    """What the rest of the engine knows and control reports."""

    server_info: Callable[[], Result]
    metrics_text: Callable[[], str]
    num_workers_up: Callable[[], bool] = field(default=lambda: True)


class ControlPlane:
    def __init__(
        self,
        table: RequestTable,
        resources: ResourceManager,
        lifecycle: Lifecycle,
        run_state: RunState,
        commands: WorkerCommands,
        operations: WorkerOperations,
        hooks: ControlHooks,
        clock: Callable[[], float],
    ):
        self._table = table
        self._resources = resources
        self._lifecycle = lifecycle
        self._run_state = run_state
        self._commands = commands
        self._operations = operations
        self._hooks = hooks
        self._clock = clock
        self._responses: list[tuple[int, ControlResponse]] = []
        self._pauses: list[_PendingPause] = []
        self._running: list[_Running] = []
        self._deferred: deque[_Deferred] = deque()

    @property
    def holds_steps(self) -> bool:
        """Restarted workers are being brought to the state of their predecessors."""
        return bool(self._running) and any(running.request is None for running in self._running)

    @property
    def is_busy(self) -> bool:
        return bool(self._pauses or self._running or self._deferred)

    def take_responses(self) -> list[tuple[int, ControlResponse]]:
        responses, self._responses = self._responses, []
        return responses

    def handle(self, request: ControlRequest) -> None:
        if isinstance(request.command, STATE_CHANGES) and not self._may_start(request.command):
            self._deferred.append(_Deferred(request, self._clock() + _patience_s(request.command)))
            return
        self._dispatch(request)
        self.settle()

    def _may_start(self, command: ControlCommand) -> bool:
        """Whether a change of state need not wait for those that came before it."""
        exclusive = self._exclusive()
        if self._deferred or exclusive is None:
            return not self._deferred
        # What is still coming to rest does so no later for a pause, and leaves the engine paused then; a resume ends it.
        return isinstance(command, Pause | Resume) and exclusive.waits_for_stop

    # -- what happens elsewhere -----------------------------------------------------------------

    def settle(self) -> None:
        """Answer what has become true. To be called after every result and every change of requests."""
        while True:
            if self._run_state.mode is not Mode.RUNNING and self._run_state.settle():
                for pause in self._take_pauses():
                    if pause.drains and self._run_state.has_unfinished:
                        self._fail(pause.request, EngineError(409, "stopped by another command before the running requests had finished"))
                    else:
                        self._succeed(pause.request, {"is_paused": True})
                waiting = [running for running in self._running if running.waits_for_stop]
                for running in waiting:
                    running.waits_for_stop = False
                    self._drive(running, None)
            if not self._deferred or self._exclusive() is not None:
                return
            self._dispatch(self._deferred.popleft().request)

    def expire(self, now: float) -> None:
        """Answer 504 to what has taken too long."""
        for waiting in [waiting for waiting in self._deferred if waiting.deadline <= now]:
            self._deferred.remove(waiting)
            self._fail(waiting.request, EngineError(504, "another command has not ended in time; nothing was done"))
        if not self._pauses and not self._running:
            return
        late = [pause for pause in self._pauses if pause.deadline <= now]
        for pause in late:
            self._pauses.remove(pause)
            self._fail(pause.request, EngineError(504, "the engine did not come to rest in time; it is running"))
        if late and not self._pauses:
            self._run_state.held = False
            if not any(running.waits_for_stop for running in self._running):
                self._run_state.run()
        for running in [r for r in self._running if r.deadline <= now and r.may_expire]:
            running.progress.expired = True
            assert running.request is not None
            if running.waits_for_stop:
                running.waits_for_stop = False
                self._drive(running, None)
            else:
                running.answered = True
                self._fail(running.request, EngineError(504, "the workers did not answer in time; see the log for how it ends"))
        self.settle()

    def next_deadline(self) -> float | None:
        if not self.is_busy:
            return None
        deadlines = [pause.deadline for pause in self._pauses] + [waiting.deadline for waiting in self._deferred]
        deadlines += [running.deadline for running in self._running if running.may_expire]
        return min(deadlines, default=None)

    def workers_lost(self, why: str) -> None:
        """To be called when the steps in flight are void."""
        self._commands.lost(why)
        self.settle()

    def workers_restarted(self) -> None:
        if self._operations.must_restore:
            self._start(None, self._operations.restore(), Progress(), timeout_s=0.0, exclusive=True)

    # -- dispatch -------------------------------------------------------------------------------

    def _dispatch(self, request: ControlRequest) -> None:
        try:
            result = self._answer_or_start(request)
        except ControlError as failure:
            self._fail(request, failure.error)
            return
        if result is not None:
            self._succeed(request, result)

    def _answer_or_start(self, request: ControlRequest) -> Result | None:
        """The result if there is one at once; None when the answer will come later."""
        command = request.command
        if isinstance(command, Pause):
            return self._pause(request, command)
        if isinstance(command, Resume):
            return self._resume()
        if isinstance(command, IsPaused):
            return {"is_paused": self._run_state.is_stopped}
        if isinstance(command, AbortRequests):
            return self._abort(command)
        if isinstance(command, FlushCache):
            return {"num_flushed_blocks": self._resources.flush()}
        if isinstance(command, GetServerInfo):
            return self._hooks.server_info()
        if isinstance(command, GetMetrics):
            return {"text": self._hooks.metrics_text()}
        self._start_operation(request)
        return None

    def _start_operation(self, request: ControlRequest) -> None:
        command, operations, progress = request.command, self._operations, Progress()
        if isinstance(command, UpdateWeights | UpdateWeightsFromTensors):
            self._start(request, operations.update_weights(command, progress), progress, timeout_s=command.timeout_s, exclusive=True)
        elif isinstance(command, Sleep):
            self._start(request, operations.sleep(command, progress), progress, timeout_s=command.timeout_s, exclusive=True)
        elif isinstance(command, Wakeup):
            self._start(request, operations.wakeup(command, progress), progress, timeout_s=command.timeout_s, exclusive=True)
        elif isinstance(command, WeightsChecksum):
            self._start(request, operations.checksum(), progress)
        elif isinstance(command, Profile):
            self._start(request, operations.profile(command), progress)
        elif isinstance(command, PrepareGrammar):
            self._start(request, operations.prepare_grammar(command), progress)
        elif isinstance(command, SetLogLevel):
            self._start(request, operations.set_log_level(command), progress)
        else:
            raise ControlError(404, f"no such command: {type(command).__name__}")

    # -- pause and resume -----------------------------------------------------------------------

    def _pause(self, request: ControlRequest, command: Pause) -> Result | None:
        self._run_state.held = True
        if command.mode == "drain":
            self._run_state.drain()
        else:
            self._run_state.halt(retract=command.mode == "retract")
        if command.mode == "abort":
            self._lifecycle.abort_all()
        if self._run_state.settle():
            return {"is_paused": True}
        self._pauses.append(_PendingPause(request, self._clock() + command.timeout_s, command.mode == "drain"))
        return None

    def _resume(self) -> Result:
        if self._operations.sleeping:
            raise ControlError(409, f"asleep ({', '.join(sorted(self._operations.sleeping))}): wake the engine up instead")
        if self._operations.fault is not None:
            raise ControlError(409, f"{self._operations.fault}; update the weights first")
        for pause in self._take_pauses():
            self._fail(pause.request, EngineError(409, "resumed before the pause was complete"))
        for running in [running for running in self._running if running.waits_for_stop]:
            self._give_up(running, ControlError(409, "resumed before the engine had come to rest; nothing was changed"))
        self._run_state.run()
        return {"is_paused": False}

    def _take_pauses(self) -> list[_PendingPause]:
        pauses, self._pauses = self._pauses, []
        return pauses

    # -- abort ----------------------------------------------------------------------------------

    def _abort(self, command: AbortRequests) -> Result:
        """One entry per id that was asked for; for ``abort_all`` one per client request."""
        if not command.abort_all and not command.req_ids:
            raise ControlError(400, "name requests in req_ids, or set abort_all", param="req_ids")
        names = list(dict.fromkeys(command.req_ids))
        if command.abort_all:
            names = list(dict.fromkeys(state.request.parent_id or state.request_id for state in self._table))
        # All names are looked up before the first abort: a list may hold a parent's and its children's.
        found = {name: self._table.named(name) for name in names}
        states = {state.request_id: state for named in found.values() for state in named}
        counts = {request_id: self._lifecycle.abort(state) for request_id, state in states.items()}
        return {
            "aborted": [_aborted_entry(name, named, counts) for name, named in found.items() if named],
            "not_found": [name for name, named in found.items() if not named],
        }

    # -- worker operations ----------------------------------------------------------------------

    def _exclusive(self) -> _Running | None:
        return next((running for running in self._running if running.exclusive), None)

    def _start(
        self,
        request: ControlRequest | None,
        operation: Operation,
        progress: Progress,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        exclusive: bool = False,
    ) -> None:
        running = _Running(request, operation, progress, self._clock() + timeout_s, exclusive)
        self._running.append(running)
        self._drive(running, None)

    def _drive(self, running: _Running, answer: Replies | None) -> None:
        """Resume the operation until it waits for something that isn't there yet, or ends."""
        while True:
            try:
                step = running.operation.send(answer)
            except StopIteration as end:
                self._running.remove(running)
                self._conclude(running, end.value, None)
                return
            except ControlError as failure:
                self._running.remove(running)
                self._conclude(running, {}, failure.error)
                return
            if isinstance(step, Send):
                if self._hooks.num_workers_up():
                    self._commands.send(step.name, step.args, lambda replies: self._replied(running, replies))
                    return
                answer = lost_replies()
            else:
                if not self._run_state.settle():
                    running.waits_for_stop = True
                    return
                answer = None

    def _give_up(self, running: _Running, why: ControlError) -> None:
        """End an operation that waits for the engine to stop: it has changed nothing yet."""
        self._running.remove(running)
        try:
            running.operation.throw(why)
        except ControlError as failure:
            self._conclude(running, {}, failure.error)

    def _replied(self, running: _Running, replies: Replies) -> None:
        self._drive(running, replies)
        self.settle()

    def _conclude(self, running: _Running, result: Result, error: EngineError | None) -> None:
        if running.request is None:
            if error is not None:
                logger.error("restarted workers could not be restored: %s", error.message)
        elif running.answered:
            logger.warning("%s ended after its timeout: %s", type(running.request.command).__name__, error.message if error else "done")
        elif error is not None:
            self._fail(running.request, error)
        else:
            self._succeed(running.request, result)

    # -- answers --------------------------------------------------------------------------------

    def _succeed(self, request: ControlRequest, result: Result) -> None:
        self._responses.append((request.client_index, ControlResponse(request_id=request.request_id, result=result)))

    def _fail(self, request: ControlRequest, error: EngineError) -> None:
        self._responses.append((request.client_index, ControlResponse(request_id=request.request_id, error=error)))

    @property
    def is_paused_or_pausing(self) -> bool:
        return self._run_state.mode is not Mode.RUNNING


def _patience_s(command: ControlCommand) -> float:
    """How long a change of state may wait for its turn: less than its API process waits for the answer."""
    return QUICK_PATIENCE_S if isinstance(command, Resume) or not isinstance(command, STATE_CHANGES) else command.timeout_s


def _aborted_entry(name: str, states: list[RequestState], num_output: dict[str, int]) -> dict[str, Any]:
    counts = {state.request_id: num_output[state.request_id] for state in states}
    entry: dict[str, Any] = {"request_id": name, "num_output_tokens": sum(counts.values())}
    if list(counts) != [name]:
        entry["children"] = [{"request_id": child, "num_output_tokens": count} for child, count in counts.items()]
    return entry
