"""BlockPool: the one place that knows, for each KV block, who holds it.

::

    blank ------allocate------> owned (references >= 1) --release, no key--> blank
    retained --allocate (evicts the least recently used)--> owned
    retained --acquire (prefix hit)--> owned --release, has a key--> retained

``blank + retained + owned == total`` always. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastengine.cache.lru_order import LruOrder
from fastengine.cache.prefix_index import PrefixIndex


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are blank or retained: the caller must check first."""


class BlockPool:
    """Reference counts, blank blocks, and the least-recently-used order of retained ones.

    A retained block belongs to nobody but its content is still known to ``index``; it is given out
    again when no blank block is left. ``on_evict(blocks, keys)`` is called before their content is lost.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, on_evict: Callable[[list[int], list[bytes]], None] | None = None):
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.num_evictions = 0
        self._index = index
        self._on_evict = on_evict
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._retained = LruOrder(num_blocks)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` could give out now."""
        return len(self._blank) + len(self._retained)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each. Raises OutOfBlocks, and then takes none."""
        blank = self._blank
        missing = count - len(blank)
        if missing > len(self._retained):
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_available} available of {self.num_blocks}")
        if missing > 0:
            self._evict(missing)
        if count == 0:
            return []
        blocks = blank[-count:]
        del blank[-count:]
        references = self.references
        for block in blocks:
            references[block] = 1
        return blocks

    def _evict(self, count: int) -> None:
        blocks = self._retained.pop_oldest(count)
        keys = self._index.take_out(blocks)
        if self._on_evict is not None:
            self._on_evict(blocks, keys)
        self._blank += blocks
        self.num_evictions += count

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of ``blocks``, which are owned or retained."""
        references = self.references
        for block in blocks:
            if references[block] == 0:
                self._retained.remove(block)
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence, in the order of its block table.

        Tails become the first to be evicted: a prefix is of use without its tail, not the reverse.
        """
        references = self.references
        key_of = self._index.key_of
        unowned = []
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} released more often than held")
            references[block] = left
            if left == 0:
                if key_of[block] is None:
                    self._blank.append(block)
                else:
                    unowned.append(block)
        self._retained.extend(unowned)

    def num_unowned(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` are retained, not owned: acquiring them takes from ``num_available``."""
        references = self.references
        return sum(1 for block in blocks if references[block] == 0)

    def forget(self, block: int) -> None:
        """The content of ``block`` must not be found again; if nobody holds it, it becomes blank."""
        if self._index.forget(block) and not self.references[block]:
            self._retained.remove(block)
            self._blank.append(block)

    def forget_all(self) -> int:
        """Forget the content of every block; returns how many had one."""
        known = len(self._index)
        self._index.clear()
        self._blank.extend(self._retained)
        # As at the start, the lowest first: on a CPU the memory of the others may not have been taken.
        self._blank.sort(reverse=True)
        self._retained.clear()
        return known

    def check(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless the books balance; ``holders``: block -> sequences that list it."""
        owned = {block for block, count in enumerate(self.references) if count}
        blank, retained = set(self._blank), set(self._retained)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not (owned & blank) | (owned & retained) | (blank & retained), "a block is in two places"
        assert len(owned) + len(blank) + len(retained) == self.num_blocks, (
            f"{len(blank)} blank + {len(retained)} retained + {len(owned)} owned != {self.num_blocks} blocks"
        )
        for block, count in enumerate(self.references):
            assert holders.get(block, 0) == count, f"block {block}: {count} references, {holders.get(block, 0)} holders"
        for block in blank:
            assert self._index.key_of[block] is None, f"blank block {block} has a key"
        for block in retained:
            assert self._index.key_of[block] is not None, f"retained block {block} has no key"
        self._retained.check()
        self._index.check()
