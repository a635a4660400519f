"""A broadcast ring in shared memory: one writer, a fixed number of readers, no lock.

Layout of the file (all integers little-endian uint64, one per cache line so that sides don't share)::

    0      magic | 64  capacity | 128  number of readers
    192    written: bytes ever written
    256+64*i   read[i]: bytes ever read by reader i
    data   capacity bytes, used as a circle

A message is an 8-byte header (its length) and its bytes, padded to 8. A message never wraps: when it
doesn't fit before the end, the writer puts a SKIP header there and starts over at offset 0. The writer
copies the message, then stores ``written``; a reader sees ``written``, copies out, then stores
``read[i]``. Stores become visible in program order on x86-64; on other processors a reader is ordered
by the bell's system calls, which is why it must have been rung (see :mod:`fastengine.ipc.bell`).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

MAGIC = 0x464552494E470001
LINE = 64
WRITTEN_AT = 3 * LINE
READ_AT = 4 * LINE
HEADER = struct.Struct("<Q")
SKIP = 2**64 - 1


class RingFull(BufferError):
    """The slowest reader has not made room: it hangs, or the ring is too small for the load."""


class RingCorrupt(RuntimeError):
    """The memory holds what no writer of this version wrote."""


def _padded(length: int) -> int:
    return (length + 7) & ~7


class _Mapping:
    """The mapped file and its two kinds of counters."""

    def __init__(self, path: Path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self.view = memoryview(self.memory)
        self.counters = self.view[: READ_AT + LINE * self._header(2)].cast("Q")
        if self._header(0) != MAGIC:
            raise RingCorrupt(f"{path} is not a ring of this version")
        self.capacity = self._header(1)
        self.num_readers = self._header(2)
        self.data_at = READ_AT + LINE * self.num_readers
        self.data = self.view[self.data_at : self.data_at + self.capacity]

    def _header(self, index: int) -> int:
        return HEADER.unpack_from(self.view, index * LINE)[0]

    def close(self) -> None:
        for view in (self.data, self.counters, self.view):
            view.release()
        self.memory.close()


def create_ring(path: str | Path, *, capacity: int, num_readers: int) -> None:
    """Make the ring's file; writer and readers attach to it in any order.

    ``capacity``: bytes of message room, a multiple of 4096; one message may take half of it. The file
    is sparse: memory is used as the ring first turns.
    """
    if capacity % 4096 or num_readers < 1:
        raise ValueError(f"capacity {capacity} must be a multiple of 4096 and num_readers {num_readers} at least 1")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, READ_AT + LINE * num_readers + capacity)
        for index, value in enumerate((MAGIC, capacity, num_readers)):
            os.pwrite(fd, HEADER.pack(value), index * LINE)
    finally:
        os.close(fd)


class RingWriter:
    """The only writer."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._map = _Mapping(self.path)
        self._written = self._map.counters[WRITTEN_AT // 8]

    @property
    def max_message_bytes(self) -> int:
        return self._map.capacity // 2 - HEADER.size

    def publish(self, message: bytes | memoryview) -> None:
        """Copy ``message`` in for every reader. Raises RingFull, or ValueError when it can never fit."""
        length = len(message)
        if length > self.max_message_bytes:
            raise ValueError(f"a message of {length} bytes exceeds this ring's {self.max_message_bytes}")
        ring = self._map
        offset = self._written % ring.capacity
        need = HEADER.size + _padded(length)
        skipped = ring.capacity - offset if offset + need > ring.capacity else 0
        if self._written + skipped + need - self._slowest() > ring.capacity:
            raise RingFull(f"ring {self.path.name}: reader {self.slowest_reader()} is {self._written - self._slowest()} bytes behind")
        if skipped:
            HEADER.pack_into(ring.data, offset, SKIP)
            offset = 0
        HEADER.pack_into(ring.data, offset, length)
        ring.data[offset + HEADER.size : offset + HEADER.size + length] = message
        self._written += skipped + need
        ring.counters[WRITTEN_AT // 8] = self._written

    def slowest_reader(self) -> int:
        reads = [self._map.counters[(READ_AT + LINE * i) // 8] for i in range(self._map.num_readers)]
        return reads.index(min(reads))

    def _slowest(self) -> int:
        counters = self._map.counters
        return min(counters[(READ_AT + LINE * i) // 8] for i in range(self._map.num_readers))

    def unread_bytes(self, reader: int) -> int:
        return self._written - self._map.counters[(READ_AT + LINE * reader) // 8]

    def close(self) -> None:
        self._map.close()


class RingReader:
    """Reader ``index`` of a ring; each index has one reader."""

    def __init__(self, path: str | Path, index: int = 0):
        self._map = _Mapping(Path(path))
        if not 0 <= index < self._map.num_readers:
            raise ValueError(f"reader {index} of a ring with {self._map.num_readers} readers")
        self._slot = (READ_AT + LINE * index) // 8
        self._read = self._map.counters[self._slot]

    @property
    def has_message(self) -> bool:
        return self._map.counters[WRITTEN_AT // 8] != self._read

    def try_read(self) -> bytes | None:
        """The next message, or None when all have been read."""
        ring = self._map
        written = ring.counters[WRITTEN_AT // 8]
        if written == self._read:
            return None
        offset = self._read % ring.capacity
        length = HEADER.unpack_from(ring.data, offset)[0]
        if length == SKIP:
            self._read += ring.capacity - offset
            offset = 0
            length = HEADER.unpack_from(ring.data, 0)[0]
        if length > ring.capacity // 2 or self._read + HEADER.size + _padded(length) > written:
            raise RingCorrupt(f"a message of {length} bytes at {offset}, {written - self._read} bytes unread")
        message = bytes(ring.data[offset + HEADER.size : offset + HEADER.size + length])
        self._read += HEADER.size + _padded(length)
        ring.counters[self._slot] = self._read
        return message

    def close(self) -> None:
        self._map.close()
