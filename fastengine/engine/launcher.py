"""The worker processes: started with ``paddle.distributed.launch``, watched by handle, explained when they die.

::

    engine process ── launcher (paddle.distributed.launch) ──┬── worker rank 0
                                                              └── worker rank 1 ...

The launcher dies with the engine and each worker dies with the launcher (the kernel sees to both), so
nothing can be left behind. A dead rank is seen through its pidfd in the engine's own poll, at once; the
launcher's exit code is not evidence (it is the first non-zero one in rank order, not the culprit's).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from fastengine.config import EngineConfig
from fastengine.ipc.worker_link import GENERATION_PREFIX, EngineEnd, RingSizes, generation_dir
from fastengine.protocol.steps import WorkerFailure

LOG_TAIL_LINES = 30
# How long the ranks of a stopped group may take before they are killed.
STOP_TIMEOUT_S = 5.0
# How long the ranks of a stuck group get to write where they stand.
STACK_DUMP_S = 0.5


def worker_script() -> str:
    """The file that ``paddle.distributed.launch`` runs: it takes a path, not a module name."""
    spec = importlib.util.find_spec("fastengine.worker")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("fastengine.worker is not installed: run 'pip install .' in the fastengine checkout")
    return str(Path(next(iter(spec.submodule_search_locations))) / "__main__.py")


def first_generation(runtime_dir: Path) -> int:
    """A number that no workers of this instance have had; removes what those of a dead engine left."""
    used = [int(path.name.removeprefix(GENERATION_PREFIX)) for path in runtime_dir.glob(f"{GENERATION_PREFIX}*")]
    for generation in used:
        shutil.rmtree(generation_dir(runtime_dir, generation), ignore_errors=True)
    return max(used, default=-1) + 1


class WorkerGroup:
    """One generation of worker ranks with the shared memory that links them to the engine.

    Must be made by the main thread: the launcher lives as long as the thread that started it.
    """

    def __init__(self, config: EngineConfig, runtime_dir: Path, generation: int, sizes: RingSizes):
        self.num_ranks = config.parallel.tensor_parallel_size
        self.generation = generation
        self.link = EngineEnd(runtime_dir, generation, self.num_ranks, sizes)
        self.log_dir = Path(config.parallel.worker_log_dir or runtime_dir) / f"worker-logs-{generation}"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.started_at = time.monotonic()
        self.failures: list[WorkerFailure] = []
        self._rank_fds: dict[int, int] = {}  # rank -> pidfd
        self._launcher = self._start_launcher(runtime_dir)
        self._launcher_fd = os.pidfd_open(self._launcher.pid)

    def launch_command(self, runtime_dir: Path) -> list[str]:
        """The command that starts all ranks, writes each one's ``workerlog.<rank>`` and ends when they have."""
        command = [sys.executable, "-m", "fastengine.engine.launch_ranks", str(os.getpid())]
        command += ["--nproc_per_node", str(self.num_ranks), "--log_dir", str(self.log_dir), worker_script()]
        return [*command, "--runtime-dir", str(runtime_dir), "--generation", str(self.generation)]

    def _start_launcher(self, runtime_dir: Path) -> subprocess.Popen[bytes]:
        command = self.launch_command(runtime_dir)
        with (self.log_dir / "launcher.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def watch_rank(self, rank: int, pid: int) -> None:
        """Follow a rank by its process handle from now on."""
        if rank not in self._rank_fds:
            with contextlib.suppress(ProcessLookupError):  # died already: the launcher will tell
                self._rank_fds[rank] = os.pidfd_open(pid)

    def exit_fds(self) -> list[int]:
        """Descriptors that become readable when a process of the group ends."""
        return [self._launcher_fd, *self._rank_fds.values()]

    def pids(self) -> list[int]:
        return [self._launcher.pid, *(pid for pid in self.link.signals.all("pid") if pid)]

    def explain_death(self) -> str:
        """Why the group died: the failed rank's own last words, or the end of its log."""
        if self.failures:
            first = self.failures[0]
            return f"worker rank {first.rank} failed in {first.phase}: {first.message}\n{first.traceback.rstrip()}"
        for rank in range(self.num_ranks):
            tail = log_tail(self.log_of(rank))
            if "Traceback" in tail or "Error" in tail:
                return f"worker rank {rank} died\nits log ends with:\n{tail}"
        code = self._launcher.poll()
        if code is not None and code < 0:
            return f"the launcher was killed ({signal.Signals(-code).name}), and its workers with it"
        # Its log begins with a banner and repeats the ranks' exit codes: worth showing only where it failed itself.
        _, found, trace = log_tail(self.log_dir / "launcher.log").partition("Traceback")
        if found:
            return f"the launcher ended with code {code}\nits log ends with:\n{found}{trace}"
        return "a worker process was killed from outside (no error in its log)"

    def log_of(self, rank: int) -> Path:
        return self.log_dir / f"workerlog.{rank}"

    def last_words(self) -> dict[str, str]:
        """process -> the traceback it sent, or the end of its log."""
        words = {f"worker rank {rank}": log_tail(self.log_of(rank)) for rank in range(self.num_ranks)}
        return words | {f"worker rank {failure.rank}": failure.traceback for failure in self.failures}

    def dump_stacks(self) -> dict[str, str]:
        """Have every rank write where each of its threads stands; process -> what it wrote, or its state when it can't."""
        pids = {rank: pid for rank, pid in enumerate(self.link.signals.all("pid")) if pid}
        written = {rank: _size(self.log_of(rank)) for rank in pids}
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                os.kill(pid, signal.SIGCONT)  # one that was stopped could not answer
        deadline = time.monotonic() + STACK_DUMP_S
        for fd in self._rank_fds.values():
            _wait_exit(fd, deadline - time.monotonic())
        stacks = {}
        for rank, pid in pids.items():
            text = _text_from(self.log_of(rank), written[rank])
            stacks[f"worker rank {rank}"] = text.strip() or f"pid {pid} does not answer; {_process_state(pid)}"
        return stacks

    def wait_for_ranks(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Let ranks that were told to shut down end by themselves."""
        deadline = time.monotonic() + timeout_s
        for fd in self._rank_fds.values():
            _wait_exit(fd, deadline - time.monotonic())

    def kill(self) -> None:
        """End every process of the group now and delete its shared memory."""
        for pid in self.pids()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait(timeout=STOP_TIMEOUT_S)
        for fd in self.exit_fds():
            _wait_exit(fd, STOP_TIMEOUT_S)
            os.close(fd)
        self._rank_fds.clear()
        self.link.close()


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, or a note that there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _text_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _process_state(pid: int) -> str:
    """The kernel's word for what a process does (``State: D (disk sleep)``)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "it has ended"
    return next((line for line in lines if line.startswith("State:")), "its state is unknown")


def _wait_exit(pidfd: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(max(0.0, timeout_s) * 1000)


__all__ = ["WorkerGroup", "first_generation", "generation_dir", "log_tail", "worker_script"]
