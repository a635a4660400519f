"""What a checkpoint is to the rest of the worker, whatever its file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class StoredTensor:
    """A matrix as the file has it: ``data`` uint8, row after row in the format ``type_name`` (GGUF's names).

    ``row_order`` int32[rows]: which stored row each row of the tensor is; None: they lie in order.
    """

    data: np.ndarray
    type_name: str
    row_order: np.ndarray | None = None


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

    def stored(self, name: str) -> StoredTensor | None:
        """The file's own bytes of ``name``, for who can use them as they are; None if there are none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays that were read stay valid."""
