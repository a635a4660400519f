"""KV blocks in files: one file per block in this rank's own directory, written and read by a thread of its own.

::

    file    magic | length | CRC-32 of the bytes | key        one header, little-endian
            the block's bytes: every pool of every layer

A file appears under its name when it is whole. What can't be written, or does not read back as it was
written, is a failed block and nothing more: the engine computes it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastengine.protocol.steps import WorkerReply

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<8sQQ32s")
MAGIC = b"fe-kv-1\0"
MAX_KEY_BYTES = 32
UNFINISHED = ".part"
# The system takes at most 1,024 buffers in one call.
MAX_PIECES = 512
Pieces = Sequence[memoryview]


class DamagedFile(OSError):
    """A file that does not hold what was written to it."""


class BlockFiles:
    """The files of one rank in ``directory``, which is made (mode 0700) if it is not there; used by one thread.

    Files of an earlier process of the rank are kept, those it had not finished are removed.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        for leftover in directory.glob(f"*{UNFINISHED}"):
            leftover.unlink()

    def write(self, key: bytes, pieces: Pieces) -> None:
        """Store the bytes of ``pieces`` under ``key``. Raises OSError, and leaves no file then."""
        path = self._path(key)
        unfinished = path.with_name(path.name + UNFINISHED)
        header = HEADER.pack(MAGIC, sum(map(len, pieces)), _checksum(pieces), key)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(fd, [memoryview(header), *pieces])
            finally:
                os.close(fd)
            unfinished.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, key: bytes, pieces: Pieces) -> None:
        """Fill ``pieces`` with what was stored under ``key``. Raises OSError; they may hold anything then."""
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = os.read(fd, HEADER.size)
            length = sum(map(len, pieces))
            if len(header) < HEADER.size or os.fstat(fd).st_size != HEADER.size + length:
                raise DamagedFile(f"{self._path(key)} does not have the length of a block")
            _read_all(fd, list(pieces))
        finally:
            os.close(fd)
        if header != HEADER.pack(MAGIC, length, _checksum(pieces), key):
            raise DamagedFile(f"{self._path(key)} has another checksum than when it was written")

    def remove(self, key: bytes) -> None:
        """Remove the file of ``key`` if there is one. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
        return self._directory / key.hex()


def _checksum(pieces: Pieces) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        pieces = _after(pieces, os.writev(fd, pieces[:MAX_PIECES]))


def _read_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        count = os.readv(fd, pieces[:MAX_PIECES])
        if count == 0:
            raise DamagedFile("a file has become shorter while it was read")
        pieces = _after(pieces, count)


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """``pieces`` without their first ``count`` bytes."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[i + 1 :]]
        count -= len(piece)
    return []


class BlockTransfers:
    """Carries blocks between host memory and files, in the order asked for, in one thread.

    ``pieces_of(block)`` is a host block's memory; it must stay in place until :meth:`wait` has returned.
    ``reply`` is called by the thread when a command is done.
    """

    def __init__(self, files: BlockFiles, pieces_of: Callable[[int], Pieces], rank: int, reply: Callable[[WorkerReply], None]):
        self._files = files
        self._pieces_of = pieces_of
        self._rank = rank
        self._reply = reply
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="block-files")
        self._unfinished: deque[Future[None]] = deque()
        self._is_failing = False

    def store(self, command_id: int, remove: Sequence[bytes], keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Remove the files of ``remove``, then write each host block to the file of its key."""
        self._begin(command_id, remove, keys, blocks, self._files.write)

    def load(self, command_id: int, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Read each key's file into its host block."""
        self._begin(command_id, (), keys, blocks, self._files.read)

    def wait(self, moved: Callable[[], None] = lambda: None) -> None:
        """Until everything asked for is done and answered, ``moved`` being told of each. Raises what the answering raised."""
        while self._unfinished:
            self._unfinished.popleft().result()
            moved()

    def close(self) -> None:
        """Finish, and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _begin(
        self, command_id: int, remove: Sequence[bytes], keys: Sequence[bytes], blocks: Sequence[int], transfer: Callable[[bytes, Pieces], None]
    ) -> None:
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft().result()  # a thread that could not answer ends the rank: nobody would ever hear of its blocks
        pairs = list(zip(keys, blocks, strict=True))
        self._unfinished.append(self._thread.submit(self._run, command_id, remove, pairs, transfer))

    def _run(self, command_id: int, remove: Sequence[bytes], pairs: list[tuple[bytes, int]], transfer: Callable[[bytes, Pieces], None]) -> None:
        result: dict[str, Any] = {"failed": []}
        error = ""
        try:
            for key in remove:
                self._files.remove(key)
            for i, (key, block) in enumerate(pairs):
                if not self._succeeds(transfer, key, block):
                    result["failed"].append(i)
        except Exception as failure:  # told to the engine, which gives these blocks up
            logger.exception("a transfer of KV blocks failed")
            error, result = f"{type(failure).__name__}: {failure}", {}
        self._reply(WorkerReply(command_id=command_id, rank=self._rank, result=result, error=error))

    def _succeeds(self, transfer: Callable[[bytes, Pieces], None], key: bytes, block: int) -> bool:
        try:
            transfer(key, self._pieces_of(block))
        except OSError as error:
            if not self._is_failing:
                logger.warning("KV blocks in files: %s; such blocks are computed again", error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True
