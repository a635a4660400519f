"""DiskTier: which KV blocks are in files, which are being written, and which files must go.

Pure accounting; the files are the workers'. Blocks reach the disk from the host tier and come back to it::

    saved on the host --begin_store--> being written --end_store--> stored --(bound, failure, clear)--> to be removed

What :meth:`take_removals` returns must be removed before the next blocks are written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class DiskTier:
    """``num_blocks``: most blocks in files at any time, those being written included; 0: there is no such tier."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._writing: dict[bytes, None] = {}
        self._removals: list[bytes] = []

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    def knows(self, key: bytes) -> bool:
        """Whether ``key`` is stored or being written."""
        return key in self._stored or key in self._writing

    def touch(self, keys: Iterable[bytes]) -> None:
        """``keys``, all stored, in the order of a block table: its tail becomes the first of them to go."""
        for key in list(keys)[::-1]:
            self._stored.move_to_end(key)

    def begin_store(self, keys: Sequence[bytes]) -> None:
        """``keys``, none of them known and at most ``num_blocks``, are about to be written; the oldest make room."""
        for _ in range(len(self._stored) + len(self._writing) + len(keys) - self.num_blocks):
            key, _none = self._stored.popitem(last=False)
            self._removals.append(key)
        self._writing.update(dict.fromkeys(keys))

    def end_store(self, stored: Iterable[bytes], failed: Iterable[bytes]) -> None:
        """How the writing of keys ended. A failed one may have left a file."""
        for key in stored:
            del self._writing[key]
            self._stored[key] = None
        for key in failed:
            del self._writing[key]
            self._removals.append(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """The files of ``keys`` can't be read: they count as gone."""
        for key in keys:
            if key in self._stored:
                del self._stored[key]
                self._removals.append(key)

    def clear(self) -> int:
        """Forget all that is stored; returns how much that was. What is being written is not affected."""
        known = len(self._stored)
        self._removals += self._stored
        self._stored.clear()
        return known

    def take_removals(self) -> list[bytes]:
        removals, self._removals = self._removals, []
        return removals

    def remove_later(self, keys: Iterable[bytes]) -> None:
        """What :meth:`take_removals` returned has not been removed after all."""
        self._removals += keys

    @property
    def has_removals(self) -> bool:
        return bool(self._removals)

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert not self._stored.keys() & self._writing.keys(), "a block is stored and being written"
        assert not self._stored.keys() & set(self._removals), "a file that holds something is to be removed"
        total = len(self._stored) + len(self._writing)
        assert total <= self.num_blocks, f"{total} blocks on a disk that may hold {self.num_blocks}"
