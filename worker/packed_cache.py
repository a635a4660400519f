"""Packed weights on disk, so that only the first start on a machine packs them.

::

    magic | crc32 and length of the description | description, JSON | zeros to a page | the packed bytes

A file is written beside its place and moved there, so what bears a key's name is whole; several processes
that start at once write the same bytes, and the last one stays. What is read is checked against the sums
in the description: a damaged file is packed again. The bytes are mapped privately: processes share their
pages, and a weight update changes the process's own copy, never the file. Where the file is not on huge pages,
each process has a copy that is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastengine.worker.memory import ask_for_huge_pages, with_huge_pages

logger = logging.getLogger(__name__)

SUFFIX = ".packed"
MAGIC = b"FEPACK01"
HEAD = struct.Struct("<8sII")
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
CHUNK_BYTES = 8 << 20
# Packing less than this takes no time worth a file.
LEAST_BYTES = 16 << 20
MAX_DESCRIPTION_BYTES = 64 << 20
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
# A file that somebody was writing this long ago has no writer any more.
STALE_S = 3600.0


class PackedFileError(ValueError):
    """A file of the cache is not what was once written there."""


@dataclass(frozen=True)
class PackedWeights:
    """``memory``: the packed bytes, writable and this process's alone; ``hashes``: of each checkpoint tensor, for the checksum."""

    memory: mmap.mmap
    hashes: dict[str, int]


class PackedCache:
    """Files of packed weights in one directory, ``limit_bytes`` together; the longest unused go first."""

    def __init__(self, directory: Path, limit_bytes: int, num_threads: int, *, least_bytes: int = LEAST_BYTES):
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._num_threads = num_threads
        self._least_bytes = least_bytes

    def find(self, identity: dict[str, str]) -> PackedWeights | None:
        """What was stored for ``identity``; None, with a warning if there is a file that can't be used."""
        path = self._path(identity)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("packed weights in %s can't be read, and are packed again: %s", path, error)
            return None
        try:
            found = _read(fd, identity, self._num_threads)
        except (OSError, PackedFileError) as error:
            logger.warning("packed weights in %s are not usable, and are packed again: %s", path, error)
            return None
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # only the order in which files are given up depends on it
            os.utime(path)
        return found

    def store(self, identity: dict[str, str], data: np.ndarray, hashes: dict[str, int]) -> None:
        """Keep ``data`` (contiguous bytes) for the next start. What prevents that is logged, not raised."""
        if data.nbytes < self._least_bytes:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(data.nbytes)
            _write(self._path(identity), identity, data, hashes, self._num_threads)
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", self._directory, error)

    def _path(self, identity: dict[str, str]) -> Path:
        return self._directory / (hashlib.sha256(_canonical(identity)).hexdigest()[:32] + SUFFIX)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the longest unused files, and what dead writers left. Raises OSError when there is no room in spite of that."""
        if num_bytes > self._limit_bytes:
            raise OSError(f"{num_bytes >> 20} MiB are more than --packed-cache-gib allows")
        kept = 0
        for path, status in _newest_first(self._directory.glob(f"*{SUFFIX}")):
            kept += status.st_size
            if kept + num_bytes > self._limit_bytes:
                path.unlink(missing_ok=True)
        for path, status in _newest_first(self._directory.glob(f".*{SUFFIX}.*")):
            if time.time() - status.st_mtime > STALE_S:
                path.unlink(missing_ok=True)
        free = shutil.disk_usage(self._directory).free
        if free < 2 * num_bytes:
            raise OSError(f"{free >> 20} MiB are free there, and {num_bytes >> 20} should not take more than half")


def model_files_identity(files: Iterable[Path]) -> str:
    """Changes when a file does: names, sizes, times of change and a sample of the content."""
    parts: list[str] = []
    for path in files:
        status = path.stat()
        parts.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {_sample(path, status.st_size):08x}")
    return "; ".join(parts)


def processor_features() -> str:
    """What this processor can do, as a short hash: the layout may depend on any of it."""
    flags: set[str] = set()
    with contextlib.suppress(FileNotFoundError):  # no /proc: all processors of this machine are taken for one
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features", "model name")):
                flags.update(line.partition(":")[2].split())
    return hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Hash of a small file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _newest_first(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Those that are still there, by the time they were last used."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found.append((path, path.stat()))
    return sorted(found, key=lambda item: item[1].st_mtime, reverse=True)


def _sample(path: Path, size: int) -> int:
    total = 0
    with path.open("rb", buffering=0) as file:
        for i in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
            total = zlib.crc32(file.read(SAMPLE_BYTES), total)
    return total


def _canonical(identity: dict[str, str]) -> bytes:
    return json.dumps(identity, sort_keys=True).encode()


def _sums(data: memoryview, num_threads: int) -> list[int]:
    """crc32 of each chunk; zlib lets other threads run meanwhile."""
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return list(pool.map(zlib.crc32, chunks))


def _data_at(description_bytes: int) -> int:
    return -(-(HEAD.size + description_bytes) // PAGE_BYTES) * PAGE_BYTES


def _write(path: Path, identity: dict[str, str], data: np.ndarray, hashes: dict[str, int], num_threads: int) -> None:
    packed = memoryview(data).cast("B")
    description = json.dumps({"identity": identity, "num_bytes": len(packed), "sums": _sums(packed, num_threads), "hashes": hashes}).encode()
    head = HEAD.pack(MAGIC, zlib.crc32(description), len(description)) + description
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in (memoryview(head.ljust(_data_at(len(description)), b"\0")), packed):
            while part:
                part = part[os.write(fd, part[: 1 << 28]) :]
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _read(fd: int, identity: dict[str, str], num_threads: int) -> PackedWeights:
    """Raises PackedFileError or OSError."""
    head = os.pread(fd, HEAD.size, 0)
    if len(head) != HEAD.size:
        raise PackedFileError("the file is shorter than its head")
    magic, expected_sum, description_bytes = HEAD.unpack(head)
    if magic != MAGIC or description_bytes > MAX_DESCRIPTION_BYTES:
        raise PackedFileError("it does not begin like one")
    description_text = os.pread(fd, description_bytes, HEAD.size)
    if zlib.crc32(description_text) != expected_sum:
        raise PackedFileError("its description is damaged")
    description = json.loads(description_text)
    if description["identity"] != identity:
        raise PackedFileError("it holds other weights")
    offset, num_bytes = _data_at(description_bytes), int(description["num_bytes"])
    if os.fstat(fd).st_size != offset + num_bytes:
        raise PackedFileError(f"it has {os.fstat(fd).st_size} bytes instead of {offset + num_bytes}")
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    ask_for_huge_pages(memory)
    with memoryview(memory) as view:
        if _sums(view, num_threads) != description["sums"]:
            raise PackedFileError("its content is damaged")
    return PackedWeights(with_huge_pages(memory), description["hashes"])
