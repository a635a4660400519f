"""Buffers for kernels on the host shim: encoded values, poisoned outputs, and an unmapped page behind each."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from fastengine.custom_ops.cuda import abi

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

PROT_NONE = 0

STORAGE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}


def _fp8_table() -> np.ndarray:
    """The values of the codes 0 to 126 of float8 e4m3fn (no infinity; 127 is NaN)."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))


FP8_TABLE = _fp8_table()


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as they are stored, rounded to nearest even; int8 and fp8 saturate."""
    if dtype == "bfloat16":
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "int8":
        return np.clip(np.rint(values), -127, 127).astype(np.int8)
    if dtype == "fp8":
        magnitude = np.minimum(np.abs(np.asarray(values, dtype=np.float64)), 448.0)
        above = np.clip(np.searchsorted(FP8_TABLE, magnitude), 1, 126)
        low, high = FP8_TABLE[above - 1], FP8_TABLE[above]
        nearer_low = (magnitude - low < high - magnitude) | ((magnitude - low == high - magnitude) & ((above - 1) % 2 == 0))
        return (np.where(nearer_low, above - 1, above) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    return np.asarray(values).astype(STORAGE[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Stored elements as float64 (integers stay integers)."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "fp8":
        codes = stored & 127
        return np.where(codes == 127, np.nan, FP8_TABLE[np.minimum(codes, 126)]) * np.where(stored & 128, -1.0, 1.0)
    return stored.astype(np.float64) if dtype.startswith("float") else stored


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What remains of values once stored as ``dtype``, as float64."""
    return decode(encode(values, dtype), dtype)


class _Pages:
    """Mapped memory whose end is followed by an unmapped page."""

    def __init__(self, num_bytes: int):
        self._size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._base = _libc.mmap(None, self._size + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.end = self._base + self._size
        _libc.mprotect(self.end, mmap.PAGESIZE, PROT_NONE)

    def __del__(self) -> None:
        _libc.munmap(self._base, self._size + mmap.PAGESIZE)


class Buffer:
    """An array in memory whose last byte (padded to 16) is followed by an unmapped page."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        self.dtype = dtype
        storage, count = STORAGE[dtype], int(np.prod(shape))
        num_bytes = max(16, -(-count * storage.itemsize // 16) * 16)
        pages = _Pages(num_bytes)
        self.pointer = pages.end - num_bytes
        raw = (ctypes.c_char * num_bytes).from_address(self.pointer)
        # Every view of the array holds on to the memory.
        raw.pages = pages  # type: ignore[attr-defined]
        self.stored = np.frombuffer(raw, dtype=storage, count=count).reshape(shape)

    @property
    def values(self) -> np.ndarray:
        return decode(self.stored, self.dtype)


def filled(values: np.ndarray, dtype: str = "float32") -> Buffer:
    values = np.asarray(values)
    buffer = Buffer(values.shape, dtype)
    buffer.stored[...] = encode(values, dtype)
    return buffer


def poisoned(shape: tuple[int, ...], dtype: str = "float32") -> Buffer:
    """All bits set: NaN for the float types, -1 for integers."""
    buffer = Buffer(shape, dtype)
    buffer.stored.view(np.uint8)[...] = 0xFF
    return buffer


def copied(buffer: Buffer) -> Buffer:
    other = Buffer(buffer.stored.shape, buffer.dtype)
    other.stored[...] = buffer.stored
    return other


class Kernels:
    """The operators on the host shim, with buffers (kept alive through the call) in place of pointers."""

    def __init__(self, operators: abi.Operators):
        self.operators = operators

    def call(self, name: str, **fields: Any) -> None:
        self.operators.call(name, **_pointers(fields))

    def status(self, name: str, **fields: Any) -> int:
        return self.operators.status(name, **_pointers(fields))


def _pointers(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.pointer if isinstance(value, Buffer) else value for name, value in fields.items()}
