"""The shared memory between one engine and its worker ranks: bytes both ways, each side woken by a bell.

::

    engine --"plans" ring, one reader per rank------> every rank      then rings each rank's bell
    rank i --"results-i" ring, read by the engine---> engine          then rings the engine's bell
    rank i --signal board---------------------------> engine          looked at, never waited for

Everything of one *generation* of workers lies in ``workers-<generation>/`` of the runtime directory: when
workers are started again after a crash, what their predecessors left can't reach them.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from fastengine.ipc.bell import Bell, BellClosed, BellRinger
from fastengine.ipc.ring import RingReader, RingWriter, create_ring
from fastengine.ipc.signals import SignalBoard
from fastengine.ipc.spin import Spinner

MIN_RING_BYTES = 8 << 20
ENGINE_BELL = "engine.bell"
GENERATION_PREFIX = "workers-"


class RingSizes(NamedTuple):
    """Bytes of message room in the ring of plans and in rank 0's ring of results; one message may take half."""

    plans: int = MIN_RING_BYTES
    results: int = MIN_RING_BYTES


def generation_dir(runtime_dir: Path, generation: int) -> Path:
    return runtime_dir / f"{GENERATION_PREFIX}{generation}"


class EngineEnd:
    """The engine's side: creates the files, publishes to all ranks, reads each rank's answers."""

    def __init__(self, runtime_dir: Path, generation: int, num_ranks: int, sizes: RingSizes = RingSizes()):  # noqa: B008 - immutable
        self.path = generation_dir(runtime_dir, generation)
        self.path.mkdir(mode=0o700)
        self.num_ranks = num_ranks
        create_ring(self.path / "plans", capacity=sizes.plans, num_readers=num_ranks)
        for rank in range(num_ranks):
            capacity = sizes.results if rank == 0 else MIN_RING_BYTES  # the others answer commands alone
            create_ring(self.path / f"results-{rank}", capacity=capacity, num_readers=1)
        self.signals = SignalBoard(self.path / "signals", num_ranks=num_ranks, create=True)
        self._plans = RingWriter(self.path / "plans")
        self._results = [RingReader(self.path / f"results-{rank}") for rank in range(num_ranks)]
        self._bells = [BellRinger(self.path / f"rank-{rank}.bell") for rank in range(num_ranks)]
        self._spinner = Spinner()

    @property
    def max_message_bytes(self) -> int:
        return self._plans.max_message_bytes

    def publish(self, message: bytes) -> None:
        """Hand ``message`` to every rank. Raises RingFull, or BellClosed when a rank is gone."""
        self._plans.publish(message)
        for bell in self._bells:
            bell.ring()

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have come, as (rank, bytes), without waiting."""
        received = []
        for rank, ring in enumerate(self._results):
            while (message := ring.try_read()) is not None:
                received.append((rank, message))
        return received

    def look(self) -> bool:
        """Whether a message comes within a moment. False: sleep, and call :meth:`woken` afterwards."""
        return self._spinner.look(self._any_message) is not None

    def woken(self) -> None:
        self._spinner.woken()

    def _any_message(self) -> bool | None:
        return any(ring.has_message for ring in self._results) or None

    def unread_bytes(self) -> list[int]:
        """Bytes published that each rank has not read yet."""
        return [self._plans.unread_bytes(rank) for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Detach and delete this generation's files."""
        self._plans.close()
        for ring in self._results:
            ring.close()
        for bell in self._bells:
            bell.close()
        self.signals.close()
        shutil.rmtree(self.path, ignore_errors=True)


class WorkerEnd:
    """A rank's side. Attaches to the files the engine made."""

    def __init__(self, runtime_dir: Path, generation: int, rank: int, num_ranks: int):
        path = generation_dir(runtime_dir, generation)
        self._bell = Bell(path / f"rank-{rank}.bell")
        self._plans = RingReader(path / "plans", rank)
        self._results = RingWriter(path / f"results-{rank}")
        self._engine_bell = BellRinger(runtime_dir / ENGINE_BELL)
        self._spinner = Spinner()
        self._sending = threading.Lock()
        self.signals = SignalBoard(path / "signals", num_ranks=num_ranks)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next message from the engine; None when none came within ``timeout_s``."""
        message = self._plans.try_read()
        if message is None:
            message = self._spinner.look(self._plans.try_read)
        if message is None:
            # Rings may be left over from messages that were found without them.
            self._bell.clear()
            message = self._plans.try_read()
            if message is None and self._bell.wait(timeout_s):
                message = self._plans.try_read()
            self._spinner.woken()
        return message

    def send(self, message: bytes) -> None:
        """Answer the engine, from any thread. Raises RingFull when it doesn't read, BellClosed when it is gone."""
        with self._sending:  # the ring has one writer
            self._results.publish(message)
        self._engine_bell.ring()

    def close(self) -> None:
        self._bell.close()
        self._plans.close()
        self._results.close()
        self.signals.close()


class EngineBell:
    """What the engine loop sleeps on: rung by every rank and by the engine's own threads."""

    def __init__(self, runtime_dir: Path):
        self._bell = Bell(runtime_dir / ENGINE_BELL)
        self._ringer = BellRinger(runtime_dir / ENGINE_BELL)
        self._closed = False

    def fileno(self) -> int:
        """For a poll over the bell and other descriptors; call :meth:`clear` when it is readable."""
        return self._bell.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        return self._bell.wait(timeout_s)

    def clear(self) -> None:
        self._bell.clear()

    def ring(self) -> None:
        """Wake the loop from another thread of the engine, or from a signal handler; nothing once the loop has ended."""
        if self._closed:
            return
        with contextlib.suppress(BellClosed):  # the loop has ended: nobody is left to wake
            self._ringer.ring()

    def close(self) -> None:
        self._closed = True
        self._bell.close()
        self._ringer.close()
