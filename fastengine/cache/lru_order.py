"""LruOrder: blocks in the order of their last use, as a linked list in two arrays.

::

    newer    end -> least recently used -> ... -> most recently used -> end
    older    the same, the other way round

Eight bytes a block, allocated once. A dictionary that keeps its order would do, too, but Python rebuilds it now and
then as entries come and go: with some hundred thousand blocks that stops everything for a multiple of a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice


class LruOrder:
    """Some of the blocks 0 to ``num_blocks - 1``, each at most once: whether one is among them is the caller's to know."""

    def __init__(self, num_blocks: int):
        self._end = num_blocks  # stands before the first and behind the last
        self._newer = array("i", [0]) * (num_blocks + 1)
        self._older = array("i", [0]) * (num_blocks + 1)
        self.clear()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """From the least recently used on."""
        block = self._newer[self._end]
        while block != self._end:
            yield block
            block = self._newer[block]

    def clear(self) -> None:
        self._size = 0
        self._newer[self._end] = self._older[self._end] = self._end

    def extend(self, blocks: Iterable[int]) -> None:
        """``blocks``, which are not among them, have just been used, the last one last."""
        newer, older, end = self._newer, self._older, self._end
        last = older[end]
        for block in blocks:
            newer[last] = block
            older[block] = last
            last = block
            self._size += 1
        newer[last] = end
        older[end] = last

    def remove(self, block: int) -> None:
        """Take out ``block``, which is among them."""
        before, after = self._older[block], self._newer[block]
        self._newer[before] = after
        self._older[after] = before
        self._size -= 1

    def pop_oldest(self, count: int) -> list[int]:
        """Take out the ``count`` least recently used, the oldest first; there are at least as many."""
        newer, end = self._newer, self._end
        blocks = []
        block = newer[end]
        for _ in range(count):
            blocks.append(block)
            block = newer[block]
        newer[end] = block
        self._older[block] = end
        self._size -= count
        return blocks

    def check(self) -> None:
        """Raise AssertionError unless the list reads the same in both directions."""
        forward = [*islice(self, self._size + 1), self._end]
        assert len(forward) - 1 == self._size, f"{len(forward) - 1} blocks in the list, {self._size} counted"
        for before, block in zip([self._end, *forward], forward, strict=False):
            assert self._older[block] == before, f"block {block} stands behind {before}, and its link says {self._older[block]}"
