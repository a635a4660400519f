"""What a checkpoint is to the rest of the worker, whatever its file format."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

ALL_ROWS = slice(None)


class Checkpoint(ABC):
    """Named tensors in Hugging Face's names and row order. Safe to read from several threads."""

    # Where it comes from, for messages.
    source: str

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a model could want, without reading any."""

    @abstractmethod
    def unreadable(self) -> list[str]:
        """Tensors (with the reason) whose element type can't be read; empty when all is well."""

    @abstractmethod
    def read(self, name: str, rows: slice = ALL_ROWS) -> np.ndarray:
        """Float32 values of ``name``'s first-dimension ``rows``; may be a read-only view of the file."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays that were read stay valid."""
