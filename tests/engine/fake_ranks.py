"""Ranks of a worker group without Paddle: ``python fake_ranks.py --runtime-dir DIR --generation N --log-dir L --num-ranks R``.

Each rank is a process with a FakeWorker behind the real rings. What is to go wrong is named by the request
ids of a step: ``kill`` (the last rank dies of SIGKILL), ``raise``, ``hang`` (the last rank stops, the others wait for it), ``lie`` (a result
of another step), ``noise`` (bytes that are no message). With ``once`` in the id as well, only in generation 0.
A weight update whose path holds ``hang`` stops the last rank, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

# A script's own folder comes first on Python's path; the tests are imported from the project's root.
if sys.path[0] == str(Path(__file__).parent):
    sys.path[0] = str(Path(__file__).parents[2])

from fastengine.config import EngineConfig
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.process import die_with_parent
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import WorkerEnd
from fastengine.protocol.steps import StepPlan, StepResult, ToWorker, WorkerCommand, WorkerFailure, WorkerReady, WorkerReply
from tests.engine.fake_worker import FakeWorker

STEP_S = 0.002


class FakeRank:
    def __init__(self, args: argparse.Namespace, rank: int):
        runtime = RuntimeDir.join(args.runtime_dir)
        self.config = EngineConfig.from_json(runtime.file("config.json").read_bytes())
        self.args, self.rank = args, rank
        self.link = WorkerEnd(runtime.path, args.generation, rank, args.num_ranks)
        self.worker: FakeWorker | None = None

    def send(self, message: object) -> None:
        self.link.send(ENCODER.encode(message))

    def run(self) -> None:
        self.link.signals.set("pid", self.rank, os.getpid())
        self.send(WorkerReady(rank=self.rank, pid=os.getpid(), device="none", bytes_per_block=1024, num_blocks=100))
        decode = msgspec.msgpack.Decoder(ToWorker).decode
        while True:
            message = self.link.receive(None)
            if message is None:
                continue
            request = decode(message)
            if isinstance(request, StepPlan):
                self.step(request)
            elif not self.command(request):
                return

    def command(self, command: WorkerCommand) -> bool:
        """Answer; False after a shutdown."""
        if command.name == "init_cache":
            scheduler, block_size = self.config.scheduler, self.config.cache.block_size
            num_blocks = command.args["num_blocks"]
            self.worker = FakeWorker(num_blocks, block_size, scheduler.max_num_seqs, scheduler.token_budget)
        elif command.name != "shutdown":
            assert self.worker is not None
            if "hang" in (command.args.get("path") or ""):
                self.hang()
            self.send(self.worker.reply(command, self.rank))
            return True
        self.send(WorkerReply(command_id=command.command_id, rank=self.rank))
        return command.name != "shutdown"

    def step(self, plan: StepPlan) -> None:
        assert self.worker is not None
        if self.args.num_ranks == 1:
            self.worker.last_cut_step_id = self.link.signals.get("last_cut_step_id", self.rank)
        results = list(self.worker.run(plan))
        time.sleep(STEP_S * plan.num_steps)
        for request_id in self.worker.last_batch:
            if "once" not in request_id or self.args.generation == 0:
                self.misbehave(request_id, plan.step_id)
        if self.rank == 0:
            for result in results:
                self.send(result)

    def misbehave(self, request_id: str, step_id: int) -> None:
        is_last = self.rank == self.args.num_ranks - 1
        if "kill" in request_id and is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "hang" in request_id:
            self.hang()
        elif "raise" in request_id:
            raise RuntimeError(f"can't compute {request_id}")
        elif "lie" in request_id:
            self.send(StepResult(step_id=step_id + 1000))
        elif "noise" in request_id:
            self.link.send(b"\xc1 noise")

    def hang(self) -> None:
        if self.rank == self.args.num_ranks - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # for the others' part of the sum


def run_rank(args: argparse.Namespace, rank: int) -> None:
    log = os.open(f"{args.log_dir}/workerlog.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    die_with_parent(os.getppid())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    fake = FakeRank(args, rank)
    try:
        fake.run()
    except Exception as error:
        fake.send(WorkerFailure(rank=rank, phase="step", message=f"RuntimeError: {error}", traceback=f"Traceback of rank {rank}: {error}"))
        raise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(os.getppid())
    for rank in range(args.num_ranks):
        if os.fork() == 0:
            run_rank(args, rank)
            os._exit(0)
    for _ in range(args.num_ranks):
        os.wait()


if __name__ == "__main__":
    main()
