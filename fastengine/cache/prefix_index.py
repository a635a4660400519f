"""What full KV blocks contain: chained keys, and the two maps between keys and blocks.

A block's key names everything its KV depends on::

    root   = H(weights epoch, adapter, salt)
    key[0] = H(root   | tokens of block 0)
    key[i] = H(key[i-1] | tokens of block i)

H is BLAKE2b with 16 bytes of digest: for two different prefixes to meet by accident is out of reach, and
nobody can construct them on purpose, so tokens needn't be compared on a hit.

The end of a sequence fills a part of its last block. That part has a key, too, of another length than a whole block's,
so that the block can be kept: it is found by its tokens alone (see :mod:`fastengine.cache.branches`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b

from fastengine.cache.branches import Branches

KEY_BYTES = 16
PART_KEY_BYTES = 15


@functools.lru_cache(maxsize=256)
def root_key(weights_epoch: int, adapter: str, salt: str) -> bytes:
    """The key that stands before a sequence's first block."""
    parts = (str(weights_epoch).encode(), adapter.encode(), salt.encode())
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=KEY_BYTES).digest()


def chain_keys(parent: bytes, tokens: bytes | memoryview, block_bytes: int) -> list[bytes]:
    """Keys of the full blocks of ``tokens`` (little-endian int32, as bytes), the first chained to ``parent``.

    A tail shorter than ``block_bytes`` has no key.
    """
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = blake2b(parent + tokens[start : start + block_bytes], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def part_key(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """The key of a block of which only ``tokens``, fewer than fit, are known."""
    return blake2b(parent + tokens, digest_size=PART_KEY_BYTES).digest()


def is_whole(key: bytes) -> bool:
    """Whether ``key`` is that of a full block."""
    return len(key) == KEY_BYTES


class PrefixIndex:
    """The maps key -> block and block -> key, each the inverse of the other, and the branches among them.

    Owns no block: the pool decides when a block's content is lost and then calls :meth:`forget` or :meth:`take_out`.
    ``key_of`` is read directly on the hot path and written only here.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.branches = Branches(num_blocks, block_size)
        self.key_of: list[bytes | None] = [None] * num_blocks
        # By a key's first byte. A dictionary whose entries come and go is rebuilt now and then; these are at different times,
        # and none takes long.
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(256)]

    def __len__(self) -> int:
        return sum(map(len, self._block_of))

    def find(self, key: bytes) -> int | None:
        """The block that holds ``key``."""
        return self._block_of[key[0]].get(key)

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest run of known keys, at most ``limit`` of them."""
        block_of = self._block_of
        blocks = []
        for key in keys[:limit]:
            block = block_of[key[0]].get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, key: bytes, block: int, parent: bytes) -> None:
        """``block`` now holds ``key``, behind ``parent``. When another block holds the same, that one stays the known one.

        Of what it holds, :attr:`branches` must be told.
        """
        if self.key_of[block] is not None:  # of a part of what it holds now
            self.take_out([block])
        if self._block_of[key[0]].setdefault(key, block) == block:
            self.key_of[block] = key
            self.branches.add(parent, block)

    def forget(self, block: int) -> bool:
        """``block`` is not found again; returns whether it would have been."""
        known = self.key_of[block] is not None
        if known:
            self.take_out([block])
        return known

    def take_out(self, blocks: Sequence[int]) -> list[bytes]:
        """``blocks``, all of which can be found, are not found again; returns their keys."""
        key_of, block_of, branches = self.key_of, self._block_of, self.branches
        keys = []
        for block in blocks:
            key = key_of[block]
            assert key is not None
            key_of[block] = None
            del block_of[key[0]][key]
            branches.remove(block)
            keys.append(key)
        return keys

    def clear(self) -> None:
        for blocks in self._block_of:
            blocks.clear()
        self.key_of = [None] * len(self.key_of)
        self.branches.clear()

    def check(self) -> None:
        """Raise AssertionError unless the two maps are inverse to each other, and the branches are among them."""
        forward = {key: block for block, key in enumerate(self.key_of) if key is not None}
        backward = {key: block for blocks in self._block_of for key, block in blocks.items()}
        assert forward == backward, "prefix index: block -> key and key -> block disagree"
        self.branches.check(forward.values())
