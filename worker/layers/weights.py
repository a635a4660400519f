"""Parameters and where their values come from.

A layer owns :class:`Storage` for its part of a weight and describes, as :class:`WeightPiece` data,
which rows and columns of which checkpoint tensor fill which part of it. Loading, checking, updating
and hashing weights are then the same few loops over pieces for every layer and every file format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastengine.worker.memory import Index, Storage

ALL = slice(None)


@dataclass(frozen=True)
class WeightPiece:
    """``storage[target] = checkpoint[name][rows, columns]`` (transposed where ``transpose``).

    ``name`` and ``shape`` are the Hugging Face checkpoint's. A rank that holds a copy of what another
    rank counts already (replicated weights) has ``counted`` False: each element is hashed once.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    target: Index
    rows: slice = field(default_factory=lambda: ALL)
    columns: slice = field(default_factory=lambda: ALL)
    transpose: bool = False
    counted: bool = True

    def store(self, values: np.ndarray) -> None:
        """Put float32 ``values``, the checkpoint's ``rows`` of this tensor, in place."""
        part = values[:, self.columns] if values.ndim == 2 else values
        self.storage.write(self.target, part.T if self.transpose else part)

    def bits(self) -> np.ndarray:
        """What is stored, as unsigned integers in the checkpoint's orientation."""
        bits = self.storage.bits(self.target)
        return bits.T if self.transpose else bits
