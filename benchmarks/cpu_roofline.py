"""What a machine can do: the speed at which its threads read memory, and their integer peak."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from fastengine.custom_ops.fused import load_library
from fastengine.custom_ops.library import LIBRARY_PATH

REPEATS = 10


@dataclass(frozen=True)
class Machine:
    bytes_per_s: float
    operations_per_s: float


def measure_machine(num_threads: int, memory: np.ndarray) -> Machine:
    """Best of a few runs; ``memory`` (uint8, contiguous) is what is read, so that its pages and size are the model's own."""
    library = load_library(LIBRARY_PATH)
    library.fe_fused_read_speed.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.fe_fused_read_speed.restype = ctypes.c_double
    library.fe_fused_peak_speed.argtypes = [ctypes.c_int64]
    library.fe_fused_peak_speed.restype = ctypes.c_double
    reads = [library.fe_fused_read_speed(memory.ctypes.data, memory.nbytes, num_threads) for _ in range(REPEATS)]
    peaks = [library.fe_fused_peak_speed(num_threads) for _ in range(REPEATS)]
    return Machine(max(reads), max(peaks))
