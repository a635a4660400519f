"""A checkpoint of random weights, for measuring without any files."""

from __future__ import annotations

import zlib

import numpy as np

from fastengine.worker.loader.checkpoint import ALL_ROWS, Checkpoint

SCALE = 0.02


class DummyCheckpoint(Checkpoint):
    """Normal values of standard deviation 0.02, ones for norms; each tensor seeded by its own name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.source = "dummy"
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def unreadable(self) -> list[str]:
        return []

    def read(self, name: str, rows: slice = ALL_ROWS) -> np.ndarray:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype=np.float32)[rows]
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
        return (values * np.float32(SCALE))[rows]

    def close(self) -> None:
        """There is nothing to let go of."""
