"""RunCut: the engine's wish that a run of decodes ends early, seen between two of its steps."""

from __future__ import annotations

import numpy as np


class RunCut:
    """``last_step_id`` int64[1], in shared memory: no step of a run up to that one is begun any more."""

    def __init__(self, last_step_id: np.ndarray):
        self._last_step_id = last_step_id  # alive as long as its address is in use
        self.address = last_step_id.ctypes.data

    def forbids(self, step_id: int) -> bool:
        return int(self._last_step_id[0]) >= step_id


def no_cut() -> RunCut:
    """One that forbids nothing."""
    return RunCut(np.full(1, -1, dtype=np.int64))
