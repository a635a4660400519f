"""Memory that tensors live in: taken when asked, really given back when dropped.

On a CPU a :class:`Storage` is an anonymous mapping which a Paddle tensor and a numpy array share
without a copy: unused pages cost nothing, writes need no Paddle kernel, and dropping it returns the
pages to the system at once, whatever Paddle's allocator caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from pathlib import Path

import numpy as np
import paddle

from fastengine.worker.loader.mapped_file import Moved

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
# What numpy calls an element: it has no bfloat16, whose bits it holds as integers.
NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Written and read back at once while the memory sleeps on disk.
STRETCH_BYTES = 1 << 26
HUGE_PAGE_BYTES = 2 << 20
# Of a mapping that counts as being on huge pages: its ends hardly ever are.
LEAST_HUGE_SHARE = 0.75
MADV_POPULATE_WRITE = 23  # since Linux 5.14
Index = tuple[slice, ...]


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 ``values`` as elements of ``dtype``, rounded to nearest even (bfloat16: as int16 bits)."""
    if dtype != "bfloat16":
        return values.astype(NUMPY_DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).view(np.int16)


class Storage:
    """A tensor of fixed shape and dtype whose memory can be dropped and taken again.

    ``tensor`` is None while dropped; who computes must look it up at every call. ``huge_pages`` (on a
    CPU) suits what is read whole at every step, or all over.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, *, huge_pages: bool = False):
        self.huge_pages = huge_pages
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.tensor: paddle.Tensor | None = None
        self._array: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]

    def allocate(self) -> None:
        """Take the memory, zeroed. Nothing happens if it is held already."""
        if self.tensor is not None:
            return
        if self.device == "gpu":
            self.tensor = paddle.zeros(self.shape, dtype=self.dtype)
            return
        # Private: the system gives no huge pages to shared memory. In whole huge pages, as only then it begins one;
        # what is smaller would become one.
        piece = HUGE_PAGE_BYTES if self.huge_pages and self.nbytes >= HUGE_PAGE_BYTES else 1
        memory = mmap.mmap(-1, max(1, -(-self.nbytes // piece)) * piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.huge_pages:
            ask_for_huge_pages(memory)
        self.adopt(memory)

    def adopt(self, memory: mmap.mmap) -> None:
        """Use ``memory`` (``nbytes`` or more, writable, on a CPU) until it is dropped, with what it holds."""
        self._array = np.frombuffer(memory, dtype=NUMPY_DTYPES[self.dtype], count=math.prod(self.shape)).reshape(self.shape)
        tensor = paddle.from_dlpack(self._array)
        self.tensor = tensor.view("bfloat16") if self.dtype == "bfloat16" else tensor

    def drop(self) -> None:
        self.tensor = None
        self._array = None

    def write(self, index: Index, values: np.ndarray) -> None:
        """Store float32 ``values`` (rounded to the dtype) at ``index``, in place."""
        if self._array is not None:
            self._array[index] = to_bits(values, self.dtype)
        else:
            assert self.tensor is not None, "write to dropped storage"
            self.tensor[index] = paddle.to_tensor(np.ascontiguousarray(values)).astype(self.dtype)

    def bits(self, index: Index) -> np.ndarray:
        """The elements at ``index`` as unsigned integers of the element's width; on a CPU a view."""
        if self._array is not None:
            array = self._array[index]
        else:
            assert self.tensor is not None, "read of dropped storage"
            array = self.tensor[index].numpy()
        return array.view(UNSIGNED[array.dtype.itemsize])

    @property
    def address(self) -> int:
        """Where the elements lie in this process's memory; it changes with every :meth:`allocate`. On a CPU only."""
        assert self._array is not None, "no address: dropped, or not on the host"
        return self._array.ctypes.data

    @property
    def bytes_per_row(self) -> int:
        """Of the first dimension's rows."""
        return self.nbytes // self.shape[0]

    def rows(self) -> np.ndarray:
        """The memory itself as uint8 ``[first dimension, bytes_per_row]``. On the host only."""
        assert self._array is not None, "no rows: dropped, or not on the host"
        return self._array.reshape(self.shape[0], -1).view(np.uint8)

    def take_pages(self, first: int, end: int) -> bool:
        """Have the system give the rows ``first`` to ``end - 1`` (on the host) their memory now; False if it doesn't. What they hold stays."""
        assert self._array is not None, "no pages: dropped, or not on the host"
        begin = self._array.ctypes.data + first * self.bytes_per_row
        begin_of_page = begin - begin % mmap.PAGESIZE
        size = self._array.ctypes.data + end * self.bytes_per_row - begin_of_page
        madvise = ctypes.CDLL(None).madvise
        return madvise(ctypes.c_void_p(begin_of_page), ctypes.c_size_t(size), MADV_POPULATE_WRITE) == 0

    def save(self, fd: int, moved: Moved) -> None:
        """Append the raw bytes to an open file. ``moved`` is told of every stretch."""
        data = memoryview(np.ascontiguousarray(self.bits(full_index(self.shape)))).cast("B")
        while data:
            data = data[os.write(fd, data[:STRETCH_BYTES]) :]
            moved()

    def restore(self, fd: int, offset: int, moved: Moved) -> int:
        """Fill from the bytes that :meth:`save` wrote at ``offset``; returns where they end. ``moved`` is told of every stretch."""
        if self._array is not None:
            _read_exactly(fd, memoryview(self._array.view(np.uint8)).cast("B"), offset, moved)
        else:
            assert self.tensor is not None, "restore of dropped storage"
            raw = np.empty(self.shape, dtype=UNSIGNED[BYTES_PER_ELEMENT[self.dtype]])
            _read_exactly(fd, memoryview(raw.view(np.uint8)).cast("B"), offset, moved)
            same_width = {"float32": "float32", "bfloat16": "int16", "float16": "float16"}[self.dtype]
            self.tensor[...] = paddle.to_tensor(raw.view(NUMPY_DTYPES[self.dtype]), dtype=same_width).view(self.dtype)
        return offset + self.nbytes


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Before it is first touched. Of a file's pages only those that are not in the page cache yet can follow."""
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)


def with_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """``memory`` (writable, all of it read before), or a copy of it on huge pages where that has none and they can be had.

    A file's mapping has them only if its file system reads it in such pieces and nobody has read it in smaller ones
    before; what is read whole at every step is slower by a tenth and more without.
    """
    if not gives_huge_pages() or _huge_bytes(memory) >= LEAST_HUGE_SHARE * len(memory):
        return memory
    copy = mmap.mmap(-1, len(memory), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(copy)
    with memoryview(memory) as view:
        copy[:] = view
    return copy


def gives_huge_pages() -> bool:
    """Whether the system gives them to who asks."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _huge_bytes(memory: mmap.mmap) -> int:
    """How much of a mapping is on huge pages now."""
    start = np.frombuffer(memory, np.uint8).ctypes.data
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin < start + len(memory) and end > start
        elif inside and first in ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"):
            total += int(rest.split()[0]) * 1024
    return total


def full_index(shape: tuple[int, ...]) -> Index:
    return (slice(None),) * len(shape)


def _read_exactly(fd: int, into: memoryview, offset: int, moved: Moved) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done : done + STRETCH_BYTES]], offset + done)
        moved()
        if count == 0:
            raise OSError(f"the saved copy ends at byte {offset + done}, {len(into) - done} bytes early")
        done += count


def return_free_memory() -> None:
    """Hand back to the system what the C allocator and Paddle cache."""
    if paddle.device.is_compiled_with_cuda():
        paddle.device.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def rss_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def free_host_bytes() -> int:
    """Memory that can be had without swapping: the system's, or the control group's if that is less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise OSError("/proc/meminfo has no MemAvailable line")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available
