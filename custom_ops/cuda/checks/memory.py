"""Arrays that kernels can reach, on the host (for the shim) or on a GPU (through PyTorch)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .arrays import STORAGE, decode, encode


@dataclass(frozen=True)
class Array:
    """Elements as they are stored, somewhere; ``owner`` keeps the memory."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any
    fetch: Callable[[], np.ndarray]

    @property
    def stored(self) -> np.ndarray:
        """A copy of the elements on the host."""
        return self.fetch()

    @property
    def values(self) -> np.ndarray:
        """As float64; integers stay integers."""
        return decode(self.stored, self.dtype)

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * STORAGE[self.dtype].itemsize


class Memory(ABC):
    """Where workloads put their arrays, and the clock that goes with it."""

    @abstractmethod
    def upload(self, stored: np.ndarray, dtype: str) -> Array:
        """A copy of elements as they are stored."""

    @abstractmethod
    def random(self, shape: tuple[int, ...], dtype: str, spread: float = 1.0) -> Array:
        """Normal values times ``spread``, rounded; int8 and uint8: every value, alike often."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all launches. Raises RuntimeError if one failed."""

    @abstractmethod
    def seconds(self, launch: Callable[[], None], repeats: int) -> float:
        """The median time of a launch, caches cold."""

    def filled(self, values: np.ndarray, dtype: str = "float32") -> Array:
        return self.upload(encode(np.asarray(values), dtype), dtype)

    def poisoned(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """All bits set: NaN for the float types, -1 for integers."""
        storage = STORAGE[dtype]
        return self.upload(np.full(int(np.prod(shape)) * storage.itemsize, 0xFF, np.uint8).view(storage).reshape(shape), dtype)


class HostMemory(Memory):
    """numpy arrays."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def upload(self, stored: np.ndarray, dtype: str) -> Array:
        stored = np.ascontiguousarray(stored, dtype=STORAGE[dtype])
        # 16-byte alignment, which numpy does not promise, and something to point to in an empty array.
        raw = np.empty(stored.nbytes + 32, np.uint8)
        start = -raw.ctypes.data % 16
        held = raw[start : start + stored.nbytes].view(stored.dtype).reshape(stored.shape)
        held[...] = stored
        return Array(raw.ctypes.data + start, stored.shape, dtype, raw, held.copy)

    def random(self, shape: tuple[int, ...], dtype: str, spread: float = 1.0) -> Array:
        if dtype in ("int8", "uint8"):
            low, high = (-127, 128) if dtype == "int8" else (0, 256)
            return self.upload(self._rng.integers(low, high, shape), dtype)
        return self.filled(self._rng.normal(size=shape) * spread, dtype)

    def synchronize(self) -> None:
        pass

    def seconds(self, launch: Callable[[], None], repeats: int) -> float:
        return host_seconds(launch, repeats)


def host_seconds(launch: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return median(times)


class TorchMemory(Memory):
    """PyTorch tensors of bytes on a CUDA device; launches go to its current stream."""

    device = "cuda"
    # Written before every timed launch: more than any L2 cache holds.
    flush_bytes = 256 << 20

    def __init__(self, torch: Any, seed: int):
        self.torch = torch
        self._generator = torch.Generator(device=self.device).manual_seed(seed)
        self._flush = torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.device)

    @property
    def stream(self) -> int | None:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def wrap(self, tensor: Any, shape: tuple[int, ...], dtype: str) -> Array:
        raw = tensor.contiguous().reshape(-1).view(self.torch.uint8)
        return Array(int(raw.data_ptr()), shape, dtype, raw, lambda: raw.cpu().numpy().view(STORAGE[dtype]).reshape(shape))

    def upload(self, stored: np.ndarray, dtype: str) -> Array:
        stored = np.ascontiguousarray(stored, dtype=STORAGE[dtype])
        # At least one element to point to.
        raw = self.torch.empty(max(16, stored.nbytes), dtype=self.torch.uint8, device=self.device)
        raw[: stored.nbytes].copy_(self.torch.from_numpy(stored.reshape(-1).view(np.uint8).copy()))
        return (
            self.wrap(raw[: stored.nbytes], stored.shape, dtype)
            if stored.nbytes
            else Array(int(raw.data_ptr()), stored.shape, dtype, raw, stored.copy)
        )

    def random(self, shape: tuple[int, ...], dtype: str, spread: float = 1.0) -> Array:
        torch, where = self.torch, {"generator": self._generator, "device": self.device}
        if dtype in ("int8", "uint8"):
            low, high = (-127, 128) if dtype == "int8" else (0, 256)
            return self.wrap(torch.randint(low, high, shape, dtype=getattr(torch, dtype), **where), shape, dtype)
        kind = torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)
        return self.wrap((torch.randn(shape, **where) * spread).to(kind), shape, dtype)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def seconds(self, launch: Callable[[], None], repeats: int) -> float:
        cuda = self.torch.cuda
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(repeats)]
        launch()
        for start, end in events:
            self._flush.zero_()
            start.record()
            launch()
            end.record()
        cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in events) / 1e3


class TorchHostMemory(TorchMemory):
    """The same tensors in host memory, for the shim: what a GPU's checks do with PyTorch, without the GPU."""

    device = "cpu"
    flush_bytes = 16

    @property
    def stream(self) -> int | None:
        return None

    def synchronize(self) -> None:
        pass

    def seconds(self, launch: Callable[[], None], repeats: int) -> float:
        self._flush.zero_()
        return host_seconds(launch, repeats)
