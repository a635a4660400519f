"""KV blocks in this process's memory, copied between pools: those of all layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class HostBlocks:
    """Pairs of (source, target) pools of blocks, uint8 ``[num_blocks, bytes of a block]`` and contiguous; both may be the same.

    ``library``: the compiled operators; None: numpy copies, pool after pool.
    """

    def __init__(self, pools: Sequence[tuple[np.ndarray, np.ndarray]], library: ctypes.CDLL | None):
        for source, target in pools:
            assert source.dtype == target.dtype == np.uint8, "pools are bytes"
            assert source.flags.c_contiguous, "pools are contiguous"
            assert target.flags.c_contiguous, "pools are contiguous"
            assert source.shape[1] == target.shape[1], "a pool's blocks have one size"
        self._pools = list(pools)  # alive as long as their addresses are in use
        self._limits = [min((pair[side].shape[0] for pair in pools), default=0) for side in (0, 1)]
        self._copy = None
        if library is not None:
            self._copy = library.fastengine_copy_blocks
            self._copy.argtypes, self._copy.restype = [_POINTER, _POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER], None
        self._sources, self._targets = ((_POINTER * len(pools))(*(pair[side].ctypes.data for pair in pools)) for side in (0, 1))
        self._block_bytes = (_INTEGER * len(pools))(*(source.shape[1] for source, _ in pools))

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks: int32 ``[n, 2]`` of (source, target), one after the other. Raises ValueError for a block that isn't there."""
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        if not self._pools or not pairs.size:
            return
        if pairs.min() < 0 or (pairs.max(axis=0) >= self._limits).any():
            raise ValueError(f"pairs: blocks must be in [0, {self._limits[0]}) and [0, {self._limits[1]})")
        if self._copy is None:
            for source, target in self._pools:
                for from_block, to_block in pairs.tolist():
                    target[to_block] = source[from_block]
        else:
            self._copy(self._sources, self._targets, self._block_bytes, len(self._pools), pairs.ctypes.data, len(pairs))
