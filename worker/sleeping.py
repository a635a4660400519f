"""Giving memory back while the server sleeps, and having it again bit for bit.

Weights go to an unlinked file on disk rather than being read again from where they came: they may have
been updated since, or their file may have been overwritten. The file vanishes with the process however
that ends. KV blocks are not kept: the engine gives up all blocks before it sends a rank to sleep.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.memory import return_free_memory, rss_bytes
from fastengine.worker.model_host import ModelHost

WEIGHT, KV_CACHE = "weight", "kv_cache"
# On disk by convention, where the usual temporary directory may be memory itself.
PREFERRED_SPILL_DIR = "/var/tmp"


class MemoryAsleep(RuntimeError):
    """What was asked for needs memory that has been given back."""


class Sleeper:
    """Drops and restores ``host``'s memory by tag. Both directions are idempotent."""

    def __init__(self, host: ModelHost, moved: Moved):
        self._host = host
        self._moved = moved
        self._spill_fd = -1
        self._asleep: set[str] = set()

    @property
    def asleep(self) -> frozenset[str]:
        return frozenset(self._asleep)

    def sleep(self, tags: Iterable[str]) -> dict[str, Any]:
        """Give the tagged memory back. Raises OSError, with nothing dropped, if the disk has no room for the weights."""
        before = rss_bytes()
        for tag in _known(tags) - self._asleep:
            if tag == WEIGHT:
                self._spill_weights()
                self._host.release_graphs()
                self._host.weights.drop()
            elif self._host.cache is not None:
                self._host.release_graphs()
                self._host.cache.drop()
                if self._host.batch is not None:
                    self._host.batch.num_blocks_reached = 0
            self._asleep.add(tag)
        return_free_memory()
        return {"rss_bytes": rss_bytes(), "released_bytes": max(0, before - rss_bytes()), "asleep": sorted(self._asleep)}

    def wakeup(self, tags: Iterable[str]) -> dict[str, Any]:
        """Take the tagged memory again: weights as they were, KV empty."""
        for tag in _known(tags) & self._asleep:
            if tag == WEIGHT:
                self._host.weights.allocate()
                self._read_weights_back()
            elif self._host.cache is not None:
                self._host.cache.allocate()
            self._asleep.discard(tag)
        if not self._asleep:
            self._host.capture_graphs(self._moved)
        return {"rss_bytes": rss_bytes(), "asleep": sorted(self._asleep)}

    def require_awake(self, *tags: str) -> None:
        """Raises MemoryAsleep if any of ``tags`` is not in memory."""
        missing = sorted(self._asleep.intersection(tags))
        if missing:
            raise MemoryAsleep(f"{' and '.join(missing)} memory is asleep: wake it up first")

    def _spill_weights(self) -> None:
        storages = self._host.weights.storages()
        needed = sum(storage.nbytes for storage in storages)
        directory = PREFERRED_SPILL_DIR if os.access(PREFERRED_SPILL_DIR, os.W_OK) else tempfile.gettempdir()
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(f"{directory} has {free >> 20} MiB free, the weights need {needed >> 20}")
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            for storage in storages:
                storage.save(fd, self._moved)
        except BaseException:
            os.close(fd)
            raise
        self._spill_fd = fd

    def _read_weights_back(self) -> None:
        offset = 0
        for storage in self._host.weights.storages():
            offset = storage.restore(self._spill_fd, offset, self._moved)
        os.close(self._spill_fd)
        self._spill_fd = -1


def _known(tags: Iterable[str]) -> set[str]:
    wanted = set(tags)
    unknown = wanted - {WEIGHT, KV_CACHE}
    if unknown:
        raise ValueError(f"unknown memory tag {sorted(unknown)[0]!r}; {WEIGHT} and {KV_CACHE} exist")
    return wanted
