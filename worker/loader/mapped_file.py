"""Read-only views of a file's bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class MappedFile:
    """A file mapped into memory. Pages come from disk when touched and leave under memory pressure."""

    def __init__(self, path: Path):
        self.path = path
        self._bytes: np.ndarray | None = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        assert self._bytes is not None, "file is closed"
        return self._bytes.size

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """``uint8[nbytes]``, without copying."""
        assert self._bytes is not None, "file is closed"
        return self._bytes[offset : offset + nbytes].view(np.ndarray)

    def close(self) -> None:
        self._bytes = None
