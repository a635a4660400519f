"""The loop of one rank: a plan in, a result out; commands in order with the plans."""

from __future__ import annotations

import logging
import os
import sys
import time

import msgspec
import paddle

from fastengine import custom_ops
from fastengine.config import EngineConfig
from fastengine.ipc.worker_link import WorkerEnd
from fastengine.protocol.steps import FromWorker, StepPlan, ToWorker, WorkerReady
from fastengine.worker.commands import CommandHandlers
from fastengine.worker.failure import FAILURE_EXIT_CODE, Phase, report_failure
from fastengine.worker.model_host import ModelHost, select_device
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.run_cut import RunCut, no_cut

# When nothing has come for so long, nothing is under way.
LULL_S = 0.02


class Worker:
    """One rank: the model, the commands, and the link to the engine."""

    def __init__(self, host: ModelHost, link: WorkerEnd):
        self._host = host
        self._link = link
        self._rank = host.tp.rank
        self._commands = CommandHandlers(host, reply_later=self._send, moved=self._moved)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()
        self._steps_done = 0
        self._may_lack_pages = False  # blocks have been handed out since a lull
        # Ranks would see it at different steps.
        self._cut = RunCut(link.signals.cell("last_cut_step_id", self._rank)) if host.tp.size == 1 else no_cut()
        self.phase: Phase = "start"
        self.step_id = -1

    def load(self) -> None:
        """Load the weights, showing progress, and tell the engine how much KV memory there is."""
        signals, rank = self._link.signals, self._rank
        load_s = self._host.load(lambda share: signals.set("load_progress", rank, int(share * 1000)))
        ready = WorkerReady(
            rank=rank,
            pid=os.getpid(),
            device=self._host.device,
            bytes_per_block=max(1, self._host.kv_shape().bytes_per_block),  # the null model keeps nothing
            num_blocks=self._host.num_blocks_that_fit(),
            compiled_ops=self._host.compiled_ops(),
            load_s=load_s,
            computes_runs=self._host.computes_runs,
        )
        signals.set("ready", rank, 1)
        self._send(ready)

    def run(self) -> None:
        """Serve plans and commands until told to shut down."""
        patience_s = LULL_S
        while not self._commands.stopping:
            message = self._link.receive(patience_s if self._may_lack_pages else None)
            if message is None:
                self._may_lack_pages = self._may_lack_pages and self._host.take_pages_ahead()
                patience_s = 0.0  # until the next message
                continue
            patience_s = LULL_S
            request = self._decoder.decode(message)
            if isinstance(request, StepPlan):
                self._step(request)
                self._may_lack_pages = self._may_lack_pages or bool(request.started or request.grown_slots)
            else:
                self.phase = "command"
                self._link.signals.set("last_command_id", self._rank, request.command_id)
                self._moved()
                reply = self._commands.handle(request)
                self._may_lack_pages = True
                if reply is not None:
                    self._send(reply)

    def _step(self, plan: StepPlan) -> None:
        self.phase, self.step_id = "step", plan.step_id
        signals, rank = self._link.signals, self._rank
        signals.set("step_started_ns", rank, time.monotonic_ns())
        self._commands.require_awake()
        for result in self._host.steps(plan, self._cut):
            self._steps_done += result.num_steps
            self.step_id = result.step_id + result.num_steps - 1
            signals.set("steps_done", rank, self._steps_done)
            signals.set("last_step_id", rank, self.step_id)
            more = self.step_id + result.num_cut < plan.step_id + plan.num_steps - 1
            signals.set("step_started_ns", rank, time.monotonic_ns() if more else 0)
            if rank == 0:
                self._send(result)

    def _moved(self) -> None:
        """The command under way has got on. From any thread."""
        self._link.signals.set("command_moved_ns", self._rank, time.monotonic_ns())

    def _send(self, message: FromWorker) -> None:
        """From any thread: the encoder keeps nothing between calls, and the link takes one message at a time."""
        self._link.send(self._encoder.encode(message))


def run_worker(config: EngineConfig, link: WorkerEnd, *, rank: int, num_ranks: int, num_threads: int) -> int:
    """Run one rank to its end; returns the process's exit code.

    An exception anywhere is sent to the engine as a WorkerFailure and printed to stderr.
    """
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("fastengine").setLevel(config.observability.log_level)
    worker: Worker | None = None
    try:
        paddle.set_grad_enabled(False)
        custom_ops.set_num_threads(num_threads)
        tp = TensorParallel.join(rank, num_ranks, select_device(config.model.device))
        worker = Worker(ModelHost(config, tp, num_threads), link)
        worker.load()
        worker.run()
    except Exception as error:  # noqa: BLE001 - the last stop: reported to the engine, then the process ends
        report_failure(link, rank, error, phase=worker.phase if worker else "start", step_id=worker.step_id if worker else -1)
        return FAILURE_EXIT_CODE
    return 0
