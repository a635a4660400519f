"""EngineService: the order of a turn, and the life of the worker group.

::

            intake thread                      engine loop (main thread)                    workers
    ZMQ ──▶ decode ──▶ queues ──bell──▶  control, requests ──▶ EngineCore
                                          results  ◀───────────── rings ◀──bell──────────── StepResult
                                          plans, commands ──────▶ ring ──bell──▶            forward
    ZMQ ◀── Outbox ◀──────────────────── outputs, responses, statuses

The loop sleeps in one ``poll`` on its bell and on the workers' process handles. All request state is in
EngineCore and touched by this thread alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import select
import time
import traceback
from collections import deque
from collections.abc import Callable

import msgspec

from fastengine.config import EngineConfig
from fastengine.engine.client_desk import ClientDesk
from fastengine.engine.core import EngineCore
from fastengine.engine.deadlines import earliest
from fastengine.engine.evidence import Evidence
from fastengine.engine.launcher import STOP_TIMEOUT_S, WorkerGroup, first_generation
from fastengine.engine.outbox import RETRY_S
from fastengine.engine.pipeline import UnexpectedResult
from fastengine.engine.plan_feed import PlanFeed
from fastengine.engine.request_spans import RequestSpans
from fastengine.engine.request_state import ModelLimits
from fastengine.engine.ring_sizes import ring_sizes
from fastengine.engine.worker_start import INIT_CACHE_ID, EngineFailed, WorkerStart, open_kv_storage
from fastengine.ipc.ring import RingCorrupt
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell
from fastengine.observability.logs import set_log_level
from fastengine.observability.watchdog import ThreadWatchdog
from fastengine.protocol.outputs import EngineStatus
from fastengine.protocol.steps import FromWorker, StepResult, WorkerCommand, WorkerFailure, WorkerReady, WorkerReply

__all__ = ["EngineFailed", "EngineService"]

logger = logging.getLogger(__name__)

# While workers load, how often their progress is passed on.
PROGRESS_PERIOD_S = 0.5
# Crashes are counted over this window against ParallelConfig.max_worker_restarts.
RESTART_WINDOW_S = 600.0
# What a turn may take beyond --watchdog-timeout: it may end one group of workers and start the next. A busy
# machine may keep a thread waiting for its turn, too.
TURN_MARGIN_S = 4 * STOP_TIMEOUT_S
# What workers send or sent can't be understood, or belongs to nothing: they and the engine no longer agree.
DISAGREEMENT = (UnexpectedResult, ValueError, msgspec.DecodeError, RingCorrupt)


class EngineService:
    """Owns the threads, sockets and processes around one EngineCore."""

    def __init__(
        self,
        config: EngineConfig,
        runtime: RuntimeDir,
        limits: ModelLimits,
        report: Callable[[EngineStatus], None],
        group_type: type[WorkerGroup] = WorkerGroup,
    ):
        """``report`` receives every change of the engine's status (for whoever started this process).

        The thread that runs it must live as long as the process. Stack dumps must have been enabled.
        """
        self.config = config
        self._runtime = runtime
        self._limits = limits
        self._report = report
        self._bell = EngineBell(runtime.path)
        turn_s = config.parallel.watchdog_timeout and config.parallel.watchdog_timeout + TURN_MARGIN_S
        self._watchdog = ThreadWatchdog(turn_s)
        self._evidence = Evidence(config, runtime.instance_id)
        self._clients = ClientDesk(config, runtime, self._bell, ThreadWatchdog(turn_s), self._evidence)
        self._spans = RequestSpans.of(config, runtime.instance_id)
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._core: EngineCore | None = None  # made when the first workers say how many blocks there are
        self._group_type = group_type
        self._group: WorkerGroup | None = None
        self._feed: PlanFeed | None = None
        self._process_ended = False  # one of the group's
        self._storage: RuntimeDir | None = None  # of KV blocks in files; outlives the workers
        self._start = WorkerStart(config.cache, config.parallel.tensor_parallel_size)
        self._serving = False  # the workers take plans
        self._generation = first_generation(runtime.path)
        self._crash_times: deque[float] = deque()
        self._status = EngineStatus(state="starting")
        self._stop_deadline: float | None = None
        self._nobody_reads = False
        self._poll = select.poll()

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`request_stop` was called and all work has ended. Raises EngineFailed."""
        self._clients.start()
        try:
            self._storage = open_kv_storage(self.config.cache)
            self._start_workers()
            while not self._stopped():
                self._sleep()
                with self._watchdog:
                    self._turn()
            self._shut_workers_down()
        except EngineFailed as failure:
            self._set_status(state="failed", message=str(failure), has_report=True)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._evidence.crashed("engine", reason, {"engine": traceback.format_exc()})
            self._set_status(state="failed", message=f"the engine crashed: {reason}", has_report=True)
            raise
        finally:
            self._end_group()
            if self._storage is not None:
                self._storage.remove()
            self._evidence.close()
            if self._spans is not None:
                self._spans.close()
            self._clients.close(nobody_reads=self._nobody_reads)
            self._bell.close()
            self._watchdog.close()

    def request_stop(self, drain_s: float, *, nobody_reads: bool = False) -> None:
        """Finish running requests for at most ``drain_s``, then end; at once when asked again. For a signal handler of the main thread.

        ``nobody_reads``: all clients have ended.
        """
        self._nobody_reads |= nobody_reads
        self._stop_deadline = time.monotonic() + (drain_s if self._stop_deadline is None else 0.0)
        self._bell.ring()

    def _stopped(self) -> bool:
        if self._stop_deadline is None:
            return False
        busy = self._serving and self._core is not None and self._core.has_requests()
        return not busy or time.monotonic() >= self._stop_deadline

    def _turn(self) -> None:
        self._receive_from_workers()
        self._check_workers()
        self._clients.receive(self._core, self._current_status)
        if self._core is not None:
            self._core.expire()
            self._feed_workers()
            self._deliver()

    def _sleep(self) -> None:
        """Until something has happened or is due."""
        feed = self._feed
        if feed is None or not feed.num_in_flight or feed.has_lost_rank or self._clients.has_news:
            self._poll_until_due()
        elif not feed.link.look():
            self._poll_until_due()
            feed.link.woken()

    def _poll_until_due(self) -> None:
        due = self._stop_deadline
        now = time.monotonic()
        if not self._serving:
            due = earliest(due, now + PROGRESS_PERIOD_S)
        elif self._feed is not None:
            due = earliest(due, self._feed.stuck_at())
        if self._clients.has_backlog or (self._feed is not None and self._feed.has_backlog):
            due = earliest(due, now + RETRY_S)
        if self._core is not None:
            due = earliest(due, self._core.next_deadline())
        # Rounded up: waking a fraction of a millisecond early would spin until the deadline.
        timeout_ms = None if due is None else max(0, int((due - now) * 1000) + 1)
        bell = self._bell.fileno()
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == bell:
                self._bell.clear()
            else:
                self._process_ended = True

    def _deliver(self) -> None:
        assert self._core is not None
        self._clients.deliver(self._core)
        status = self._current_status()
        if status != self._status:
            self._publish_status(status)

    # -- status ---------------------------------------------------------------------------------

    def _current_status(self) -> EngineStatus:
        if self._core is None:
            return self._status
        message = self._status.message
        if self._status.state == "ready":
            message = f"{self._core.fault}; update the weights" if self._core.fault else ""
        return msgspec.structs.replace(
            self._status,
            message=message,
            paused=self._core.is_paused,
            needs_operator=self._core.needs_operator,
            sleeping=self._core.is_sleeping,
            weight_version=self._core.weight_version,
            log_level=self._core.log_level,
        )

    def _set_status(self, **changes: object) -> None:
        self._publish_status(msgspec.structs.replace(self._current_status(), **changes))

    def _publish_status(self, status: EngineStatus) -> None:
        if status.log_level not in (None, self._status.log_level):
            set_log_level(status.log_level)
        self._status = status
        self._report(status)
        self._clients.broadcast(status)

    # -- workers --------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        self._serving = False
        self._process_ended = False
        self._group = self._group_type(self.config, self._runtime.path, self._generation, ring_sizes(self.config, self._limits))
        self._feed = PlanFeed(self._group.link, self.config.parallel.watchdog_timeout)
        storage_dir = None if self._storage is None else self._storage.path
        self._start = WorkerStart(self.config.cache, self._group.num_ranks, storage_dir, self.config.scheduler.decode_run_ms)
        self._generation += 1
        self._watch_processes()

    def _watch_processes(self) -> None:
        assert self._group is not None
        self._poll = select.poll()
        for fd in (self._bell.fileno(), *self._group.exit_fds()):
            self._poll.register(fd, select.POLLIN)

    def _receive_from_workers(self) -> None:
        assert self._group is not None
        try:
            for rank, message in self._group.link.receive():
                self._process(rank, self._decode(message))
        except DISAGREEMENT as error:
            logger.exception("workers and engine no longer agree")
            self._workers_died(f"workers and engine no longer agree: {type(error).__name__}: {error}", {"engine": traceback.format_exc()})

    def _process(self, rank: int, message: FromWorker) -> None:
        assert self._group is not None
        if isinstance(message, StepResult):
            self._process_result(message)
        elif isinstance(message, WorkerReply):
            self._process_reply(message)
        elif isinstance(message, WorkerReady):
            self._rank_is_ready(message)
        else:
            self._group.failures.append(message)
            logger.error("worker rank %d: %s", rank, message.message)

    def _process_result(self, result: StepResult) -> None:
        if self._core is None or self._feed is None:
            raise UnexpectedResult(f"result of step {result.step_id} before the first step")
        self._feed.answered(result.num_steps + result.num_cut)
        self._core.process_result(result)

    def _rank_is_ready(self, ready: WorkerReady) -> None:
        assert self._group is not None
        self._group.watch_rank(ready.rank, ready.pid)
        self._watch_processes()
        command = self._start.rank_is_ready(ready)
        if command is not None:
            self._send(command)

    def _process_reply(self, reply: WorkerReply) -> None:
        assert self._feed is not None
        self._feed.replied(reply)
        if reply.command_id != INIT_CACHE_ID:
            assert self._core is not None
            self._core.process_reply(reply)
            return
        if self._start.confirm(reply):
            self._begin_serving()

    def _begin_serving(self) -> None:
        self._serving = True
        if self._core is None:
            rank_0 = self._start.ready[0]
            start = self._start
            self._core = EngineCore(
                self.config, self._limits, start.num_blocks, start.num_host_blocks, start.num_disk_blocks, decode_run_ms=start.decode_run_ms
            )
            self._core.set_compiled_ops(rank_0.device, rank_0.compiled_ops)
            self._evidence.watch(self._core)
            if self._spans is not None:
                self._core.observe_finished(self._spans.finished)
            self._clients.admit_early(self._core)
        else:
            self._core.workers_restarted(self._start.num_blocks)
            logger.warning("the workers are back after %.1f s", time.monotonic() - self._crash_times[-1])
        self._set_status(state="ready", message="", progress=1.0, num_blocks=self._start.num_blocks)

    def _check_workers(self) -> None:
        assert self._group is not None
        assert self._feed is not None
        if self._group.failures or self._process_ended:
            self._workers_died()
        elif not self._serving:
            self._watch_loading()
        else:
            stuck_at = self._feed.stuck_at()
            if stuck_at is not None and time.monotonic() >= stuck_at:
                self._workers_hang(self._feed)

    def _watch_loading(self) -> None:
        assert self._group is not None
        waited = time.monotonic() - self._group.started_at
        limit = self.config.parallel.worker_start_timeout
        if waited > limit:
            raise EngineFailed(f"the workers were not ready within --worker-start-timeout {limit:.0f} s; logs: {self._group.log_dir}")
        progress = min(self._group.link.signals.all("load_progress")) / 1000
        if progress != self._status.progress:
            self._set_status(progress=progress)

    def _workers_hang(self, feed: PlanFeed) -> None:
        """Say where every thread of every process stands, then treat the workers as dead."""
        assert self._group is not None
        standstill = feed.standstill()
        assert standstill is not None
        reason = f"{standstill.what} has not moved for {self.config.parallel.watchdog_timeout:g} s (--watchdog-timeout)"
        logger.error("%s; the threads of the engine, the workers and the API processes stand here:", reason)
        faulthandler.dump_traceback(all_threads=True)
        self._clients.have_stacks_dumped()
        stacks = self._group.dump_stacks()
        for process, stack in stacks.items():
            logger.error("%s:\n%s", process, stack)
        self._workers_died(reason, stacks)

    def _workers_died(self, reason: str | None = None, tracebacks: dict[str, str] | None = None) -> None:
        """Explain the death (``reason``, or what the group left behind), take the requests back, start the next generation."""
        group = self._group
        assert group is not None
        self._hear_last_words(group, with_results=reason is None)
        reason = reason or group.explain_death()
        self._evidence.crashed("worker", reason, {**group.last_words(), **(tracebacks or {})})
        self._end_group()
        if self._core is None:
            raise EngineFailed(f"the workers died while starting.\n{reason}")
        now = time.monotonic()
        self._crash_times.append(now)
        while self._crash_times[0] < now - RESTART_WINDOW_S:
            self._crash_times.popleft()
        if len(self._crash_times) > self.config.parallel.max_worker_restarts:
            raise EngineFailed(f"the workers died {len(self._crash_times)} times within {RESTART_WINDOW_S:.0f} s, the last time:\n{reason}")
        logger.error("the workers died and are started again: %s", reason)
        report = self._core.workers_lost(reason.splitlines()[0])
        logger.warning("%d running requests will be recomputed, %d have failed", len(report.requeued) - len(report.failed), len(report.failed))
        self._start_workers()
        self._set_status(state="recovering", message=reason.splitlines()[0], progress=0.0)

    def _hear_last_words(self, group: WorkerGroup, *, with_results: bool) -> None:
        """What was published before the death: failures, and results that still count."""
        with contextlib.suppress(*DISAGREEMENT):  # what comes after a message that makes no sense makes none either
            for _, message in group.link.receive():
                decoded = self._decode(message)
                if isinstance(decoded, WorkerFailure):
                    group.failures.append(decoded)
                elif isinstance(decoded, StepResult) and with_results:
                    self._process_result(decoded)

    def _feed_workers(self) -> None:
        assert self._core is not None
        assert self._feed is not None
        self._feed.flush()
        if not self._serving or self._feed.has_backlog:
            return
        last_cut_step_id = self._core.take_cut()
        if last_cut_step_id is not None:
            self._feed.cut_runs(last_cut_step_id)
        for command in self._core.take_commands():
            self._feed.send(command)
        while not self._feed.has_backlog:
            plan = self._core.schedule()
            if plan is None:
                return
            self._feed.send(plan)

    def _send(self, command: WorkerCommand) -> None:
        assert self._feed is not None
        self._feed.send(command)

    def _shut_workers_down(self) -> None:
        self._set_status(state="stopping")
        if self._core is not None:
            self._core.abort_everything()
            self._deliver()
        if self._group is not None and self._serving:
            self._send(WorkerCommand(command_id=INIT_CACHE_ID, name="shutdown"))
            self._group.wait_for_ranks()

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = self._feed = None
