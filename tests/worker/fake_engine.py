"""The engine's end of the rings with real worker processes behind it, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import fastengine.worker
from fastengine.config import EngineConfig
from fastengine.ipc.process import tied_to_parent
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell, EngineEnd
from fastengine.protocol.steps import FromWorker, StepPlan, StepResult, WorkerCommand, WorkerFailure, WorkerReady, WorkerReply

WORKER_MAIN = Path(fastengine.worker.__file__).parent / "__main__.py"
START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 60.0


class WorkerDied(AssertionError):
    """A rank sent a WorkerFailure, or the processes ended without one."""

    def __init__(self, text: str, failure: WorkerFailure | None = None):
        super().__init__(text)
        self.failure = failure


class FakeEngine:
    """Starts ``ranks`` workers and talks to them; leaving the context ends them all.

    One rank is started directly, more through paddle.distributed.launch, as in a real server.
    """

    def __init__(self, config: EngineConfig, tmp_path: Path, *, ranks: int = 1):
        self.num_ranks = ranks
        self.log_dir = tmp_path / "worker-log"
        self.log_dir.mkdir()
        self._runtime_dir = RuntimeDir.create()
        self._runtime_dir.file("config.json").write_bytes(config.to_json())
        self._bell = EngineBell(self._runtime_dir.path)
        self.link = EngineEnd(self._runtime_dir.path, 0, ranks)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._received: list[FromWorker] = []
        self._next_command_id = 1
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        script = [str(WORKER_MAIN), "--runtime-dir", str(self._runtime_dir.path), "--generation", "0"]
        if self.num_ranks == 1:
            command = [sys.executable, *script]
            environment = {**os.environ, "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}
        else:
            launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(self.num_ranks), "--log_dir", str(self.log_dir)]
            command = [sys.executable, *launch, *script]
            environment = dict(os.environ)
        with open(self.log_dir / "console", "wb") as console:
            return subprocess.Popen(tied_to_parent(command), env=environment, stdout=console, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.link.close()
        self._bell.close()
        self._runtime_dir.remove()

    def wait_ready(self) -> list[WorkerReady]:
        """Every rank's WorkerReady, by rank."""
        found = self._collect(WorkerReady, self.num_ranks, START_TIMEOUT_S)
        return sorted(found, key=lambda ready: ready.rank)

    def command(self, name: str, **args: Any) -> list[WorkerReply]:
        """Every rank's reply, by rank."""
        command_id, self._next_command_id = self._next_command_id, self._next_command_id + 1
        self.send(WorkerCommand(command_id=command_id, name=name, args=args))
        replies = self._collect(WorkerReply, self.num_ranks, ANSWER_TIMEOUT_S)
        assert all(reply.command_id == command_id for reply in replies)
        return sorted(replies, key=lambda reply: reply.rank)

    def do(self, name: str, **args: Any) -> dict[str, Any]:
        """Rank 0's result of a command that must succeed on every rank."""
        replies = self.command(name, **args)
        assert not any(reply.error for reply in replies), replies
        return replies[0].result

    def step(self, plan: StepPlan) -> StepResult:
        self.send(plan)
        (result,) = self._collect(StepResult, 1, ANSWER_TIMEOUT_S)
        assert result.step_id == plan.step_id
        return result

    def send(self, message: StepPlan | WorkerCommand) -> None:
        self.link.publish(msgspec.msgpack.encode(message))

    def console(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.log_dir.iterdir()))

    def _collect(self, kind: type, count: int, timeout_s: float) -> list[Any]:
        """Wait for ``count`` messages of a kind; WorkerDied if the workers end first."""
        deadline = time.monotonic() + timeout_s
        found: list[Any] = []
        while True:
            self._received += [self._decoder.decode(message) for _, message in self.link.receive()]
            for failure in [m for m in self._received if isinstance(m, WorkerFailure)]:
                raise WorkerDied(failure.traceback, failure)
            found += [m for m in self._received if isinstance(m, kind)]
            self._received = [m for m in self._received if not isinstance(m, kind)]
            if len(found) >= count:
                return found
            if self.process.poll() is not None:
                raise WorkerDied(f"workers ended with code {self.process.returncode}:\n{self.console()}")
            assert time.monotonic() < deadline, f"{len(found)} of {count} {kind.__name__} within {timeout_s} s:\n{self.console()}"
            self._bell.wait(0.5)
