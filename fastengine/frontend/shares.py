"""Who has how much to do, so that new connections go to the API process with the least.

All of them wait at one listening socket, and the kernel wakes them all: the one that happens to be first would take whatever
there is, and clients keep their connections. Each shows here what it has, and takes a connection only while nobody has less.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from fastengine.ipc.process import is_alive
from fastengine.ipc.runtime_dir import RuntimeDir

FILE = "shares"
INT64_BYTES = 8


class Shares:
    """One row (pid, amount) of ``int64`` per API process, written by it alone; a pid of 0 takes no connections.

    An amount is the number of open connections, with those that have a request under way counted twice.
    """

    def __init__(self, path: Path, index: int, num_processes: int):
        """Whoever comes first makes the file. A predecessor's row is this one's from now on."""
        size = 2 * num_processes * INT64_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            self._rows = memoryview(mmap.mmap(fd, size)).cast("q")
        finally:
            os.close(fd)
        self._mine = 2 * index
        self._others = [2 * other for other in range(num_processes) if other != index]
        self.leave()

    @classmethod
    def of(cls, runtime_dir: RuntimeDir, index: int, num_processes: int) -> Shares | None:
        """None where there is nobody to share with."""
        return None if num_processes == 1 else cls(runtime_dir.file(FILE), index, num_processes)

    def enter(self) -> None:
        """Connections are taken from now on."""
        self._rows[self._mine] = os.getpid()

    def leave(self) -> None:
        self._rows[self._mine] = 0

    def show(self, amount: int) -> None:
        self._rows[self._mine + 1] = amount

    @property
    def amount(self) -> int:
        """What this process shows."""
        return self._rows[self._mine + 1]

    def somebody_has_less(self) -> bool:
        """Whether another process should take the next connection."""
        rows = self._rows
        mine = rows[self._mine + 1]
        return any(rows[other + 1] < mine and rows[other] and is_alive(rows[other]) for other in self._others)
