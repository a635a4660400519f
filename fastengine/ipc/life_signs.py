"""What the processes of an instance show their supervisor, in shared memory: the last check they have answered."""

from __future__ import annotations

from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.signals import SignalBoard

FILE = "life-signs"
ANSWERED = "answered"
ENGINE = 0


def api_place(client_index: int) -> int:
    return 1 + client_index


class LifeSigns:
    """One ``int64`` per process, written by it alone; its place is ENGINE or :func:`api_place`."""

    def __init__(self, runtime: RuntimeDir, num_api_processes: int, *, create: bool = False):
        """The supervisor creates the file before it starts anybody."""
        self._board = SignalBoard(runtime.file(FILE), num_ranks=1 + num_api_processes, names=(ANSWERED,), create=create)

    def answer(self, place: int, number: int) -> None:
        self._board.set(ANSWERED, place, number)

    def last(self, place: int) -> int:
        """The number of the last check that was answered there; 0 before the first."""
        return self._board.get(ANSWERED, place)

    def close(self) -> None:
        self._board.close()
