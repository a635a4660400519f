"""HostTier: KV blocks in host memory that keep what the device pool had to give up.

::

    blank --claim--> idle --claim of another key (evicts the least recently used)--> idle
                      idle --pin--> pinned --last unpin--> idle, most recently used

``blank + idle + pinned + reserved == total`` always; a reserved block is being filled from elsewhere and holds no
key yet. A block that has been brought back to the device stays here as
well: when the device evicts it again, nothing needs to be copied. Pure accounting; every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping


class HostTier:
    """Which host block holds which key. A pinned block is about to be read and can't be given to another key."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.block_of: dict[bytes, int] = {}
        self.num_evictions = 0
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._pins: dict[bytes, int] = {}
        self._num_reserved = 0

    def __len__(self) -> int:
        """Blocks that hold something."""
        return len(self.block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self.block_of

    def claim(self, key: bytes) -> int | None:
        """A block that ``key``'s content is to be copied into; from now on it is found.

        None when the content is here already (then it counts as used), or when every block is pinned.
        """
        if key in self.block_of:
            if key in self._idle:
                self._idle.move_to_end(key)
            return None
        block = self._take()
        if block is not None:
            self.block_of[key] = block
            self._idle[key] = None
        return block

    def reserve(self, count: int) -> list[int]:
        """Up to ``count`` blocks to be filled from elsewhere; each must come back through :meth:`fill`."""
        blocks: list[int] = []
        while len(blocks) < count and (block := self._take()) is not None:
            blocks.append(block)
        self._num_reserved += len(blocks)
        return blocks

    def fill(self, block: int, key: bytes | None) -> None:
        """A reserved block holds ``key`` now; None: nothing of use."""
        self._num_reserved -= 1
        if key is None or key in self.block_of:
            self._blank.append(block)
        else:
            self.block_of[key] = block
            self._idle[key] = None

    def _take(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        if not self._idle:
            return None
        evicted, _none = self._idle.popitem(last=False)
        self.num_evictions += 1
        return self.block_of.pop(evicted)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep the blocks of ``keys``, all of which are here, until each is unpinned as often as pinned."""
        for key in keys:
            if key in self._pins:
                self._pins[key] += 1
            else:
                del self._idle[key]
                self._pins[key] = 1

    def unpin(self, keys: list[bytes]) -> None:
        """``keys`` in the order of a block table: its tail becomes the first to be evicted."""
        for key in reversed(keys):
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._idle[key] = None

    def clear(self) -> int:
        """Forget everything; nothing may be pinned. Returns how many blocks held something."""
        assert not self._pins, "host blocks are forgotten while they are about to be read"
        known = len(self.block_of)
        self._blank.extend(self.block_of.values())
        self.block_of.clear()
        self._idle.clear()
        return known

    def check(self, pins: Mapping[bytes, int], num_reserved: int = 0) -> None:
        """Raise AssertionError unless the books balance; ``pins``: key -> how often it should be pinned."""
        held = [*self._blank, *self.block_of.values()]
        assert len(set(held)) == len(held), "a host block is held twice"
        assert num_reserved == self._num_reserved, f"{self._num_reserved} host blocks are reserved, should be {num_reserved}"
        assert len(held) + num_reserved == self.num_blocks, f"{len(held)} host blocks and {num_reserved} reserved, should be {self.num_blocks}"
        assert self._idle.keys() | self._pins.keys() == self.block_of.keys(), "a host block is neither idle nor pinned"
        assert not self._idle.keys() & self._pins.keys(), "a host block is idle and pinned"
        assert dict(pins) == self._pins, f"host pins {self._pins}, should be {dict(pins)}"
