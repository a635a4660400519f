"""Named integers in shared memory: what a process wants to show without sending a message.

Each signal is one aligned int64 per rank, written by one side only, so a reader needs no lock. Signals
are looked at when something else has already happened (a bell, a timeout), never polled for.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

# What each rank shows, and the engine shows each rank. Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.
WORKER_SIGNALS = (
    "pid",  # the rank's process id, 0 before it started
    "ready",  # 1 once the weights are loaded
    "load_progress",  # thousandths of the weights that are loaded
    "step_started_ns",  # when the running step began; 0 between steps
    "steps_done",  # number of finished steps
    "last_step_id",
    "last_command_id",  # the command taken up last
    "command_moved_ns",  # when the command under way was taken up, or last got on
    "last_cut_step_id",  # the engine's: runs end before their next step, as far as it is not above this one
)


class SignalBoard:
    """An ``int64[len(names), num_ranks]`` array in a file, addressed by signal name and rank."""

    def __init__(self, path: str | Path, *, num_ranks: int, names: tuple[str, ...] = WORKER_SIGNALS, create: bool = False):
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        size = len(names) * num_ranks * 8
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(fd, size)
            elif os.fstat(fd).st_size != size:
                raise ValueError(f"{path} holds {os.fstat(fd).st_size} bytes, expected {size}: it belongs to another configuration")
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._rows = {name: row for row, name in enumerate(names)}
        self._values: np.ndarray | None = np.frombuffer(self._memory, dtype=np.int64).reshape(len(names), num_ranks)

    def set(self, name: str, rank: int, value: int) -> None:
        assert self._values is not None
        self._values[self._rows[name], rank] = value

    def get(self, name: str, rank: int) -> int:
        assert self._values is not None
        return int(self._values[self._rows[name], rank])

    def cell(self, name: str, rank: int) -> np.ndarray:
        """The signal itself, int64[1], for whoever looks at it without coming by here. The board must outlive its use."""
        assert self._values is not None
        row = self._rows[name]
        return self._values[row, rank : rank + 1]

    def all(self, name: str) -> list[int]:
        """The signal's value on every rank."""
        assert self._values is not None
        return self._values[self._rows[name]].tolist()

    def close(self) -> None:
        self._values = None
        self._memory.close()
