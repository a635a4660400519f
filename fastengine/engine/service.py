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

import logging
import select
import time
from collections import deque
from collections.abc import Callable

import msgspec

from fastengine.config import EngineConfig
from fastengine.engine.core import EngineCore
from fastengine.engine.intake import IntakeThread
from fastengine.engine.launcher import WorkerGroup
from fastengine.engine.outbox import RETRY_S, Outbox
from fastengine.engine.request_state import ModelLimits
from fastengine.ipc.bell import BellClosed
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.ring import RingFull
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell
from fastengine.protocol.control import ControlResponse
from fastengine.protocol.outputs import EngineError, EngineStatus
from fastengine.protocol.requests import AbortRequest, ClientGone, ClientHello, GenerateRequest
from fastengine.protocol.steps import FromWorker, StepPlan, StepResult, WorkerCommand, WorkerFailure, WorkerReady, WorkerReply

logger = logging.getLogger(__name__)

# While workers load, how often their progress is passed on.
PROGRESS_PERIOD_S = 0.5
# EngineCore numbers its commands from 1.
INIT_CACHE_ID = 0
# Crashes are counted over this window against ParallelConfig.max_worker_restarts.
RESTART_WINDOW_S = 600.0


class EngineFailed(RuntimeError):
    """The engine can't go on; the message is what the console shows."""


class EngineService:
    """Owns the threads, sockets and processes around one EngineCore."""

    def __init__(self, config: EngineConfig, runtime: RuntimeDir, limits: ModelLimits, report: Callable[[EngineStatus], None]):
        """``report`` receives every change of the engine's status (for whoever started this process)."""
        self.config = config
        self._runtime = runtime
        self._limits = limits
        self._report = report
        self._bell = EngineBell(runtime.path)
        self._intake = IntakeThread(runtime, self._bell)
        self._outbox = Outbox(runtime)
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._core: EngineCore | None = None  # made when the first workers say how many blocks there are
        self._early: deque[GenerateRequest | AbortRequest | ClientHello | ClientGone] = deque()
        self._group: WorkerGroup | None = None
        self._ready: dict[int, WorkerReady] = {}
        self._init_replies: set[int] = set()
        self._num_blocks = 0
        self._serving = False  # the workers take plans
        self._generation = 0
        self._crash_times: deque[float] = deque()
        self._plan_times: deque[float] = deque()  # when each step in flight was published
        self._undelivered: deque[bytes] = deque()  # messages the plan ring had no room for
        self._status = EngineStatus(state="starting")
        self._stop_deadline: float | None = None
        self._poll = select.poll()

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`request_stop` was called and all work has ended. Raises EngineFailed."""
        self._intake.start()
        self._start_workers()
        try:
            while not self._stopped():
                self._sleep()
                self._turn()
            self._shut_workers_down()
        except EngineFailed as failure:
            self._set_status(state="failed", message=str(failure))
            raise
        finally:
            self._end_group()
            self._outbox.close()
            self._intake.close()
            self._bell.close()

    def request_stop(self, drain_s: float) -> None:
        """Finish running requests for at most ``drain_s``, then end. For a signal handler of the main thread."""
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + drain_s
        self._bell.ring()

    def _stopped(self) -> bool:
        if self._stop_deadline is None:
            return False
        busy = self._serving and self._core is not None and self._core.has_work()
        return not busy or time.monotonic() >= self._stop_deadline

    def _turn(self) -> None:
        self._receive_from_workers()
        self._check_workers()
        self._receive_from_clients()
        if self._core is not None:
            self._core.expire()
            self._feed_workers()
            self._deliver()

    def _sleep(self) -> None:
        deadlines = [self._stop_deadline]
        now = time.monotonic()
        if not self._serving:
            deadlines.append(now + PROGRESS_PERIOD_S)
        if self._outbox.has_backlog or self._undelivered:
            deadlines.append(now + RETRY_S)
        if self._core is not None:
            deadlines.append(self._core.next_deadline())
        if self._plan_times and self.config.parallel.watchdog_timeout:
            deadlines.append(self._plan_times[0] + self.config.parallel.watchdog_timeout)
        due = min((d for d in deadlines if d is not None), default=None)
        # Rounded up: waking a fraction of a millisecond early would spin until the deadline.
        timeout_ms = None if due is None else max(0, int((due - now) * 1000) + 1)
        if self._poll.poll(timeout_ms):
            self._bell.clear()

    # -- clients --------------------------------------------------------------------------------

    def _receive_from_clients(self) -> None:
        for command in self._intake.take_commands():
            if self._core is None:
                error = EngineError(503, f"the engine is {self._status.state}", retry_after_s=1.0)
                self._outbox.send(command.client_index, ControlResponse(request_id=command.request_id, error=error))
            else:
                self._core.control(command)
        for message in self._intake.take_requests():
            if isinstance(message, ClientHello):
                self._greet(message)
            elif isinstance(message, ClientGone):
                self._outbox.drop(message.client_index)
            if self._core is None:
                self._early.append(message)
            else:
                self._admit(self._core, message)

    def _greet(self, hello: ClientHello) -> None:
        self._outbox.open(hello.client_index)
        self._outbox.send(hello.client_index, self._current_status())

    def _admit(self, core: EngineCore, message: GenerateRequest | AbortRequest | ClientHello | ClientGone) -> None:
        if isinstance(message, GenerateRequest):
            core.add_request(message)
        elif isinstance(message, AbortRequest):
            core.abort_handles(message.client_index, message.handles)
        else:  # a client that is gone, or its successor's hello: whatever the old one had running ends
            core.client_gone(message.client_index)

    def _deliver(self) -> None:
        assert self._core is not None
        for index, batch in self._core.take_outputs().items():
            if not self._outbox.send(index, batch):
                self._core.client_gone(index)
        for index, response in self._core.take_responses():
            self._outbox.send(index, response)
        if self._outbox.has_backlog:
            self._outbox.flush()
        status = self._current_status()
        if status != self._status:
            self._publish_status(status)

    # -- status ---------------------------------------------------------------------------------

    def _current_status(self) -> EngineStatus:
        if self._core is None:
            return self._status
        paused, sleeping, version = self._core.is_paused, self._core.is_sleeping, self._core.weight_version
        return msgspec.structs.replace(self._status, paused=paused, sleeping=sleeping, weight_version=version, num_blocks=self._num_blocks)

    def _set_status(self, **changes: object) -> None:
        self._publish_status(msgspec.structs.replace(self._current_status(), **changes))

    def _publish_status(self, status: EngineStatus) -> None:
        self._status = status
        self._report(status)
        self._outbox.broadcast(status)

    # -- workers --------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        self._ready.clear()
        self._init_replies.clear()
        self._serving = False
        self._group = WorkerGroup(self.config, self._runtime.path, self._generation)
        self._generation += 1
        self._watch_processes()

    def _watch_processes(self) -> None:
        assert self._group is not None
        self._poll = select.poll()
        for fd in (self._bell.fileno(), *self._group.exit_fds()):
            self._poll.register(fd, select.POLLIN)

    def _receive_from_workers(self) -> None:
        assert self._group is not None
        for rank, message in self._group.link.receive():
            decoded = self._decode(message)
            if isinstance(decoded, StepResult):
                if self._plan_times:
                    self._plan_times.popleft()
                assert self._core is not None
                self._core.process_result(decoded)
            elif isinstance(decoded, WorkerReply):
                self._process_reply(decoded)
            elif isinstance(decoded, WorkerReady):
                self._rank_is_ready(decoded)
            else:
                self._group.failures.append(decoded)
                logger.error("worker rank %d: %s", rank, decoded.message)

    def _rank_is_ready(self, ready: WorkerReady) -> None:
        assert self._group is not None
        self._ready[ready.rank] = ready
        self._group.watch_rank(ready.rank, ready.pid)
        self._watch_processes()
        if len(self._ready) < self._group.num_ranks:
            return
        cache = self.config.cache
        fits = min(rank.num_blocks for rank in self._ready.values())
        self._num_blocks = cache.num_gpu_blocks_override or fits
        if self._num_blocks < 1:
            raise EngineFailed("there is no memory for a single KV block: lower --block-size or --max-num-seqs, or set --kv-cache-memory-gib")
        args = {"num_blocks": self._num_blocks, "num_host_blocks": self._num_host_blocks()}
        self._send_command(WorkerCommand(command_id=INIT_CACHE_ID, name="init_cache", args=args))

    def _num_host_blocks(self) -> int:
        bytes_per_block = max(rank.bytes_per_block for rank in self._ready.values())
        return int(self.config.cache.swap_space * 2**30) // max(1, bytes_per_block)

    def _process_reply(self, reply: WorkerReply) -> None:
        if reply.command_id != INIT_CACHE_ID:
            assert self._core is not None
            self._core.process_reply(reply)
            return
        if reply.error:
            raise EngineFailed(f"worker rank {reply.rank} could not make the KV cache: {reply.error}")
        self._init_replies.add(reply.rank)
        if len(self._init_replies) == len(self._ready):
            self._begin_serving()

    def _begin_serving(self) -> None:
        self._serving = True
        if self._core is None:
            self._core = EngineCore(self.config, self._limits, self._num_blocks, self._num_host_blocks())
            self._core.set_compiled_ops(self._ready[0].device, self._ready[0].compiled_ops)
            while self._early:
                self._admit(self._core, self._early.popleft())
        else:
            self._core.workers_restarted(self._num_blocks)
        self._set_status(state="ready", message="", progress=1.0, num_blocks=self._num_blocks)

    def _check_workers(self) -> None:
        group = self._group
        assert group is not None
        dead = select.poll()
        for fd in group.exit_fds():
            dead.register(fd, select.POLLIN)
        if group.failures or dead.poll(0):
            self._workers_died()
            return
        if self._plan_times and self.config.parallel.watchdog_timeout:
            stuck_s = time.monotonic() - self._plan_times[0]
            if stuck_s >= self.config.parallel.watchdog_timeout:
                logger.error("a step has taken %.0f s: the workers count as dead", stuck_s)
                self._workers_died()
                return
        if not self._serving:
            self._watch_loading()

    def _watch_loading(self) -> None:
        assert self._group is not None
        waited = time.monotonic() - self._group.started_at
        limit = self.config.parallel.worker_start_timeout
        if waited > limit:
            raise EngineFailed(f"the workers were not ready within --worker-start-timeout {limit:.0f} s; logs: {self._group.log_dir}")
        progress = min(self._group.link.signals.all("load_progress")) / 1000
        if progress != self._status.progress:
            self._set_status(progress=progress)

    def _workers_died(self) -> None:
        """Explain the death, take the requests back, and start the next generation."""
        group = self._group
        assert group is not None
        for _, message in group.link.receive():  # last words, published before the death
            decoded = self._decode(message)
            if isinstance(decoded, WorkerFailure):
                group.failures.append(decoded)
            elif isinstance(decoded, StepResult) and self._core is not None:
                self._core.process_result(decoded)
        reason = group.explain_death()
        self._end_group()
        self._plan_times.clear()
        self._undelivered.clear()
        if self._core is None:
            raise EngineFailed(f"the workers died while starting.\n{reason}")
        now = time.monotonic()
        self._crash_times.append(now)
        while self._crash_times[0] < now - RESTART_WINDOW_S:
            self._crash_times.popleft()
        if len(self._crash_times) > self.config.parallel.max_worker_restarts:
            raise EngineFailed(f"the workers died {len(self._crash_times)} times within {RESTART_WINDOW_S:.0f} s, the last time:\n{reason}")
        logger.error("the workers died and are started again: %s", reason)
        self._core.workers_lost()
        self._start_workers()
        self._set_status(state="recovering", message=reason.splitlines()[0], progress=0.0)

    def _feed_workers(self) -> None:
        assert self._core is not None
        while self._undelivered and self._publish(self._undelivered[0]):
            self._undelivered.popleft()
        if not self._serving or self._undelivered:
            return
        for command in self._core.take_commands():
            self._send_command(command)
        while not self._undelivered:
            plan = self._core.schedule()
            if plan is None:
                return
            self._plan_times.append(time.monotonic())
            self._send(plan)

    def _send_command(self, command: WorkerCommand) -> None:
        self._send(command)

    def _send(self, message: StepPlan | WorkerCommand) -> None:
        encoded = ENCODER.encode(message)
        if self._undelivered or not self._publish(encoded):
            self._undelivered.append(encoded)

    def _publish(self, encoded: bytes) -> bool:
        assert self._group is not None
        try:
            self._group.link.publish(encoded)
        except RingFull:
            return False
        except BellClosed:
            # The message is in the ring, but a rank is gone: its process handle ends the group next turn.
            logger.warning("a worker rank no longer listens")
        return True

    def _shut_workers_down(self) -> None:
        self._set_status(state="stopping")
        if self._core is not None:
            self._core.abort_everything()
            self._deliver()
        if self._group is not None and self._serving:
            self._send_command(WorkerCommand(command_id=INIT_CACHE_ID, name="shutdown"))
            self._group.wait_for_ranks()

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = None
