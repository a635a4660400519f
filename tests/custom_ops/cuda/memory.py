"""Buffers for kernels on the host shim: encoded values, poisoned outputs, and an unmapped page behind each."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from fastengine.custom_ops.cuda import abi
from fastengine.custom_ops.cuda.checks.arrays import FP8_TABLE, STORAGE, decode, encode, rounded

__all__ = ["FP8_TABLE", "Buffer", "Kernels", "copied", "decode", "encode", "filled", "poisoned", "poisoned_from", "rounded"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

PROT_NONE = 0
# Of memory that nobody touches there may be more than the machine has.
MAP_NORESERVE = 0x4000


class _Pages:
    """Mapped memory whose end is followed by an unmapped page."""

    def __init__(self, num_bytes: int):
        self._size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._base = _libc.mmap(
            None, self._size + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
        )
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


def poisoned_from(first: int, shape: tuple[int, ...], dtype: str) -> Buffer:
    """The same from row ``first`` on; those before are never touched and take no memory."""
    buffer = Buffer(shape, dtype)
    buffer.stored[first:].view(np.uint8)[...] = 0xFF
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
