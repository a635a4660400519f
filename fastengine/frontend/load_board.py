"""What every API process has open, known to each of them.

A process writes its own numbers into a small file of its own in the runtime directory (tmpfs, mapped); whoever is asked reads all.
They are set, not counted up and down; those of a process that has died count for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from fastengine.ipc.process import is_alive
from fastengine.ipc.runtime_dir import RuntimeDir

# pid, streams, sequences
ROW_DTYPE = np.dtype("<i8")
NUM_COLUMNS = 3


class ProcessLoad(msgspec.Struct):
    """``streams`` are requests that clients wait for, ``sequences`` what they are made of in the engine."""

    api_worker: int
    streams: int
    sequences: int


class LoadBoard:
    """One writer per file."""

    def __init__(self, runtime_dir: RuntimeDir, client_index: int):
        self._dir = runtime_dir
        path = self._path(client_index)
        path.write_bytes(bytes(ROW_DTYPE.itemsize * NUM_COLUMNS))
        self._row = np.memmap(path, ROW_DTYPE, "r+", shape=(NUM_COLUMNS,))
        self._row[0] = os.getpid()

    def show(self, *, streams: int, sequences: int) -> None:
        """This process's numbers from now on."""
        row = self._row
        row[1] = streams
        row[2] = sequences

    def read(self) -> Iterator[ProcessLoad]:
        """Of every API process that lives, by index."""
        for index in sorted(int(path.suffix[1:]) for path in self._dir.path.glob("load.*")):
            row = np.fromfile(self._path(index), ROW_DTYPE)
            if len(row) == NUM_COLUMNS and is_alive(int(row[0])):
                yield ProcessLoad(index, int(row[1]), int(row[2]))

    def _path(self, index: int) -> Path:
        return self._dir.file(f"load.{index}")
