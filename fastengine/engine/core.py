"""EngineCore: all request state of one engine, and the order in which its parts act.

Single-threaded, without I/O, threads or sleep: whoever owns it brings requests, results, replies and
commands in, and carries plans, commands, outputs and responses out. Time comes from ``clock``.

One turn of the owner's loop::

    process_result / process_reply / control / add_request / abort_handles ...   whatever has come
    expire()
    take_cut(), take_commands(), then schedule() until it returns None           publish in this order
    take_outputs(), take_responses()                                             send
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal

from fastengine.cache.kv_cache_manager import KVCacheManager
from fastengine.config import EngineConfig
from fastengine.engine.admission import AdmissionRules, Refused
from fastengine.engine.admitter import Admit
from fastengine.engine.control import ControlHooks, ControlPlane
from fastengine.engine.deadlines import Deadlines, earliest
from fastengine.engine.gauges import engine_gauges
from fastengine.engine.invariants import check_engine
from fastengine.engine.lifecycle import FinishObserver, Lifecycle
from fastengine.engine.outputs import OutputCollector
from fastengine.engine.pipeline import Pipeline
from fastengine.engine.recovery import CrashRecovery, CrashReport
from fastengine.engine.request_state import ModelLimits, RequestState, RequestTable, Tokens
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.results import ResultProcessor
from fastengine.engine.run_length import RunLength
from fastengine.engine.run_state import Mode, RunState
from fastengine.engine.slots import SlotTable
from fastengine.engine.stop_tokens import StopTokens
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.engine.worker_commands import WorkerCommands
from fastengine.engine.worker_operations import WorkerOperations
from fastengine.model_files.load import default_model_name
from fastengine.observability.metrics import EngineMetrics, Gauges
from fastengine.protocol.control import ControlRequest, ControlResponse
from fastengine.protocol.outputs import DUPLICATE_ID, FINISH_ABORT, FINISH_ERROR, EngineError, OutputBatch, TokenOutput
from fastengine.protocol.requests import GenerateRequest
from fastengine.protocol.steps import StepPlan, StepResult, WorkerCommand, WorkerReply
from fastengine.scheduler.local import LocalScheduler
from fastengine.version import __version__

__all__ = ["EngineCore", "ModelLimits"]

# The longest sequence whose tokens and block table fit one plan beside nothing else.
MAX_SEQUENCE_TOKENS = 700_000
# Nobody knows when an operator resumes: often enough to notice, seldom enough not to matter.
PAUSED_RETRY_S = 2.0


class EngineCore:
    """The engine without its surroundings: ``num_blocks`` KV blocks on the device, ``num_host_blocks`` on the host.

    ``num_disk_blocks`` more may be kept in files; that needs blocks on the host, which they pass through.
    ``max_swaps_per_step`` blocks may be copied between the two in each direction in one step; by default as
    many as hold 4,096 tokens. ``decode_run_ms`` is what a plan of nothing but decodes may take: one step if 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        num_blocks: int,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        max_swaps_per_step: int | None = None,
        decode_run_ms: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        if limits.max_model_len > MAX_SEQUENCE_TOKENS:
            raise ValueError(f"max_model_len {limits.max_model_len} exceeds {MAX_SEQUENCE_TOKENS}, the most tokens one plan can start")
        self.config = config
        self.limits = limits
        if num_disk_blocks and not num_host_blocks:
            raise ValueError("KV blocks can only be kept in files when there are blocks on the host: they pass through them")
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_host_blocks = num_host_blocks
        self._max_swaps_per_step = max_swaps_per_step
        self._check_invariants = config.observability.check_invariants
        self._random = random.Random()
        self._arrivals = 0
        self._workers_up = True
        self._lost_at: float | None = None
        self._workers: dict[str, Any] = {}
        self._max_in_flight = 2 if config.scheduler.overlap else 1

        served = config.model.served_model_name
        model_name = served[0] if served else default_model_name(config.model.model)
        self.metrics = EngineMetrics(model_name, self._gauges, self._infos)
        self._rules = AdmissionRules(config, limits, num_blocks)
        self._table = RequestTable()
        self._slots = SlotTable(config.scheduler.max_num_seqs, limits.max_model_len, config.cache.block_size)
        self._waiting = WaitingRoom(LocalScheduler(config.scheduler.scheduling_policy))
        self._pipeline = Pipeline()
        self._outputs = OutputCollector()
        self._stop_tokens = StopTokens(limits)
        self._commands = WorkerCommands(config.parallel.tensor_parallel_size)
        run_length = RunLength(decode_run_ms, config.scheduler.max_num_seqs)
        self._resources = ResourceManager(
            config.scheduler,
            self._slots,
            self._new_cache(num_blocks),
            self._waiting,
            self.metrics,
            clock,
            self._commands,
            run_length,
            num_disk_blocks,
        )
        self._lifecycle = Lifecycle(
            self._table,
            self._slots,
            self._resources,
            self._pipeline,
            self._outputs,
            self._stop_tokens,
            self.metrics,
            clock,
        )
        self._results = ResultProcessor(
            self._slots, self._resources, self._pipeline, self._lifecycle, self._outputs, self._stop_tokens, run_length, self.metrics, clock
        )
        self._recovery = CrashRecovery(self._slots, self._lifecycle)
        self._timeouts: Deadlines[RequestState] = Deadlines(lambda request: not request.is_finished)
        self._queue_limits: Deadlines[RequestState] = Deadlines(lambda request: request.started_at is None and not request.is_finished)
        self._run_state = RunState(self._table, self._pipeline, self._resources)
        self._operations = WorkerOperations(self._resources, self._lifecycle, self._run_state, self.metrics)
        hooks = ControlHooks(self.server_info, self.metrics.render, lambda: self._workers_up)
        self._control = ControlPlane(self._table, self._resources, self._lifecycle, self._run_state, self._commands, self._operations, hooks, clock)

    def _new_cache(self, num_blocks: int) -> KVCacheManager:
        cache = self.config.cache
        return KVCacheManager(
            num_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_host_blocks=self._num_host_blocks,
            max_swaps=self._max_swaps_per_step,
        )

    # -- requests -------------------------------------------------------------------------------

    def add_request(self, request: GenerateRequest) -> None:
        """Take ``request``, or answer its client with an error (400, 409, 429, 503) at once."""
        try:
            state = self._accepted(request)
        except Refused as refused:
            self.metrics.counters["refused_requests"] += 1
            output = TokenOutput(handle=request.handle, finish_reason=FINISH_ERROR, error=refused.error)
            self._outputs.add_event(request.client_index, output)
            return
        if request.sampling.max_tokens is not None:
            self.metrics.histograms["request_params_max_tokens"].observe(request.sampling.max_tokens)
        self._lifecycle.begin(state)
        self._waiting.put(state)
        timeout_s = request.timeout_s if request.timeout_s is not None else self.config.server.request_timeout
        self._timeouts.add(state.arrived_at + timeout_s, state)
        if self.config.scheduler.max_waiting_time is not None:
            self._queue_limits.add(state.arrived_at + self.config.scheduler.max_waiting_time, state)

    def _accepted(self, request: GenerateRequest) -> RequestState:
        """Raises Refused."""
        if request.request_id in self._table or self._table.by_handle(request.client_index, request.handle) is not None:
            message = f"request_id: a request with id {request.request_id!r} is still running"
            raise Refused(409, message, param="request_id", reason=DUPLICATE_ID)
        end = self._rules.most_tokens(request)
        if self._control.is_paused_or_pausing and self.config.server.reject_while_paused:
            raise Refused(503, "the engine is paused; try again later", retry_after_s=PAUSED_RETRY_S)
        num_prompt = len(request.prompt_token_ids) // 4
        self._rules.check_queues(self._waiting.num_waiting, self._waiting.num_tokens, num_prompt, self._resources.retry_after_s)
        self._arrivals += 1
        # The client's clock is the wall's; what has passed since is counted on ours.
        on_the_way_s = max(0.0, self._wall_clock() - request.arrival_time_s) if request.arrival_time_s else 0.0
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        return RequestState(request, arrival_number=self._arrivals, arrived_at=self._clock() - on_the_way_s, end=end, seed=seed)

    def abort_handles(self, client_index: int, handles: list[int], reason: Literal["abort", "stop"] = FINISH_ABORT) -> None:
        """The client no longer wants these, or found a stop string; it is told nothing. Unknown handles are ignored."""
        for handle in handles:
            request = self._table.by_handle(client_index, handle)
            if request is not None:
                self._lifecycle.abort(request, silent=True, reason=reason)
        self._control.settle()

    def client_gone(self, client_index: int) -> None:
        """Abort everything of that API process, and drop what it was owed."""
        for request in self._table.by_client(client_index):
            self._lifecycle.abort(request, silent=True)
        self._outputs.drop_client(client_index)
        self._control.settle()

    def abort_everything(self) -> None:
        """The engine shuts down: every request ends with ``abort`` and what it has."""
        for request in list(self._table):
            self._lifecycle.abort(request)
        self._control.settle()

    def expire(self) -> None:
        """End what has waited or run for too long. Cheap; to be called each turn."""
        now = self._clock()
        for request in self._timeouts.pop_due(now):
            self._lifecycle.fail(
                request, EngineError(504, f"the request did not finish within its time limit ({now - request.arrived_at:.1f} s passed)")
            )
        for request in self._queue_limits.pop_due(now):
            message = f"the request waited for {now - request.arrived_at:.1f} s without being started; try again later"
            self._lifecycle.fail(request, EngineError(503, message, None, self._resources.retry_after_s()))
        self._control.expire(now)

    def next_deadline(self) -> float | None:
        """Clock time at which :meth:`expire` has something to do; None: never."""
        return earliest(earliest(self._timeouts.next(), self._queue_limits.next()), self._control.next_deadline())

    # -- steps ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan to publish; None when there is nothing to do now."""
        in_flight = len(self._pipeline)
        mode = self._run_state.mode
        if mode is Mode.HALTED or in_flight >= self._max_in_flight or not self._workers_up or self._control.holds_steps:
            return None
        if self._pipeline.is_being_cut:
            return None
        if self._recovery.num_suspects:
            suspect = self._recovery.next_suspect()
            if suspect is not None:
                return None if in_flight else self._published(self._resources.plan_alone(suspect))
        admit = Admit.ALL if mode is Mode.RUNNING else Admit.PREEMPTED
        may_run_on = mode is Mode.RUNNING and not self._control.is_busy
        return self._published(self._resources.plan_step(nothing_in_flight=not in_flight, admit=admit, may_run_on=may_run_on))

    def take_cut(self) -> int | None:
        """The step up to which runs are to be cut, if that is new: somebody waits for their end, or nobody for their tokens any more."""
        if not self._pipeline.may_be_cut:
            return None
        if self._resources.has_waiting or self._control.is_busy or self._pipeline.is_for_nobody:
            return self._pipeline.cut_runs()
        return None

    def _published(self, planned: Any) -> StepPlan | None:
        if planned is None:
            return None
        plan, step = planned
        self._pipeline.push(step)
        self._check()
        return plan

    def process_result(self, result: StepResult) -> None:
        """Apply the answer to the oldest steps in flight. Raises UnexpectedResult."""
        sampled = self._results.process(result)
        if self._recovery.num_suspects:
            for request in sampled:
                self._recovery.clear(request)
        self._control.settle()
        self._check()

    def take_outputs(self) -> dict[int, OutputBatch]:
        """client index -> what it is owed since the last call."""
        return self._outputs.take()

    @property
    def num_in_flight(self) -> int:
        """Plans that are not answered."""
        return len(self._pipeline)

    def has_requests(self) -> bool:
        """Whether any request or control command is unfinished; steps in flight may be for nobody any more."""
        return bool(len(self._table) or self._control.is_busy)

    def has_work(self) -> bool:
        """Whether any request or control command is unfinished."""
        return bool(len(self._table) or len(self._pipeline) or self._control.is_busy)

    # -- control --------------------------------------------------------------------------------

    def control(self, request: ControlRequest) -> None:
        self._control.handle(request)
        self._check()

    def take_responses(self) -> list[tuple[int, ControlResponse]]:
        """(client index, response) of commands whose answer is due."""
        return self._control.take_responses()

    def take_commands(self) -> list[WorkerCommand]:
        """Commands to publish to all ranks, before the next plan."""
        if self._resources.transfers.is_enabled and self._may_transfer():
            self._resources.transfers.begin()
        return self._commands.take()

    def _may_transfer(self) -> bool:
        # Suspects run alone and at once: they must not be taken out of the waiting room.
        running = self._workers_up and self._run_state.mode is Mode.RUNNING
        return running and not self._control.holds_steps and not self._recovery.num_suspects

    def process_reply(self, reply: WorkerReply) -> None:
        self._commands.process(reply)
        self._control.settle()
        self._check()

    # -- workers --------------------------------------------------------------------------------

    def workers_lost(self, why: str) -> CrashReport:
        """The worker group died (``why``: in a few words): steps in flight are void, running requests go back to be recomputed."""
        report = CrashReport()
        if not self._workers_up:
            return report
        self._workers_up = False
        self._lost_at = self._clock()
        self.metrics.counters["worker_crashes"] += 1
        participants = self._recovery.take_part(self._pipeline.void())
        report.requeued = [request.request_id for request in self._slots.running()]
        self._resources.preempt_all()
        self._recovery.accuse(participants, report)
        self._resources.reset_cache(self._new_cache(self._rules.num_blocks))
        self._control.workers_lost(why)
        self._check()
        return report

    def workers_restarted(self, num_blocks: int) -> None:
        """A new worker group is ready, with an empty KV cache of ``num_blocks``."""
        self._workers_up = True
        self.metrics.counters["worker_restarts"] += 1
        if self._lost_at is not None:
            self.metrics.histograms["worker_recovery_seconds"].observe(self._clock() - self._lost_at)
            self._lost_at = None
        self._rules = AdmissionRules(self.config, self.limits, num_blocks)
        self._resources.reset_cache(self._new_cache(num_blocks))
        for request in [request for request in self._table if not self._rules.fits(request.end)]:
            message = f"restarted workers have only {num_blocks} KV blocks, too few for this request"
            self._lifecycle.fail(request, EngineError(503, message))
        self._control.workers_restarted()
        self._check()

    def set_compiled_ops(self, device: str, compiled_ops: dict[str, str]) -> None:
        """What rank 0 said about itself, for :meth:`server_info`."""
        self._workers = {"device": device, "compiled_ops": compiled_ops}

    # -- evidence -------------------------------------------------------------------------------

    def observe_finished(self, observer: FinishObserver) -> None:
        """Call ``observer``, too, with each request that has finished: its tokens stand in ``request.tokens``."""
        self._lifecycle.observers.append(observer)

    def live_requests(self) -> list[tuple[RequestState, Tokens]]:
        """All unfinished requests with their tokens so far, prompt and output. For a report, not for the hot path."""
        return [(request, self._slots.tokens_of(request)) for request in self._table]

    # -- what is true now -----------------------------------------------------------------------

    @property
    def kv_swaps_per_step(self) -> int:
        """Most KV blocks that one plan copies in each direction between device and host."""
        return self._resources.kv.max_swaps

    @property
    def is_paused(self) -> bool:
        return self._run_state.is_stopped

    @property
    def needs_operator(self) -> bool:
        """Paused, and no command is under way that could let it go on."""
        return self.is_paused and not self._control.is_busy

    @property
    def is_sleeping(self) -> bool:
        return bool(self._operations.sleeping)

    @property
    def fault(self) -> str | None:
        """Why nothing runs until the weights have been updated; None: nothing is wrong with them."""
        return self._operations.fault

    @property
    def weight_version(self) -> str:
        return self._lifecycle.weight_version

    @property
    def log_level(self) -> str | None:
        """What somebody has set; None: as configured."""
        return self._operations.log_level

    def server_info(self) -> dict[str, Any]:
        """Configuration (secrets hidden), sizes, queues and counters."""
        return {
            "version": __version__,
            "weight_version": self.weight_version,
            "is_paused": self.is_paused,
            "sleeping": sorted(self._operations.sleeping),
            "fault": self.fault,
            "config": self.config.flat(),
            "workers": self._workers,
            "gauges": {name: value for name, (_, value) in self._gauges().items()},
            "counters": dict(self.metrics.counters),
            "finished": dict(self.metrics.finished),
        }

    def _gauges(self) -> Gauges:
        flags = {"is_paused": self.is_paused, "is_sleeping": self.is_sleeping}
        return engine_gauges(
            self._table, self._slots, self._waiting, self._resources.kv, self._resources.transfers.disk, self._pipeline, self.metrics.counters, flags
        )

    def _infos(self) -> dict[str, dict[str, str]]:
        cache, kv = self.config.cache, self._resources.kv
        return {
            "cache_config_info": {
                "block_size": str(cache.block_size),
                "num_gpu_blocks": str(kv.num_blocks),
                "num_cpu_blocks": str(kv.host.num_blocks),
                "enable_prefix_caching": str(cache.enable_prefix_caching).lower(),
            },
            "weight_version_info": {"weight_version": self.weight_version},
        }

    def _check(self) -> None:
        if self._check_invariants:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raise AssertionError unless all books balance: blocks, slots, queues, table."""
        check_engine(self._table, self._slots, self._waiting, self._resources)
