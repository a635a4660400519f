"""Read-only views of a file's bytes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Called whenever a long command gets on: the engine takes one that stands still for hanging (--watchdog-timeout).
Moved = Callable[[], None]
# Seconds from the slowest of disks.
STRETCH_BYTES = 16 << 20


class MappedFile:
    """A file mapped into memory. Pages come from disk when touched and leave under memory pressure."""

    def __init__(self, path: Path, moved: Moved | None = None):
        """``moved`` is told of every stretch that :meth:`paged_in` has read."""
        self.path = path
        self._moved = moved
        self._bytes: np.ndarray | None = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        assert self._bytes is not None, "file is closed"
        return self._bytes.size

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """``uint8[nbytes]``, without copying."""
        assert self._bytes is not None, "file is closed"
        return self._bytes[offset : offset + nbytes].view(np.ndarray)

    def paged_in(self, part: np.ndarray) -> np.ndarray:
        """``part``, contiguous in a view, after its pages were touched one after the other; at once if nobody is to be told."""
        if self._moved is not None:
            flat = part.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, STRETCH_BYTES):
                flat[start : start + STRETCH_BYTES : mmap.PAGESIZE].max()
                self._moved()
        return part

    def close(self) -> None:
        self._bytes = None
