"""Branches: where a prompt leaves what is cached, inside of a block.

By the key of what comes before them, the blocks that can be found, with their tokens::

    parent's key -> | block 7: a b c d e f g h |      a prompt that goes on with  a b c d x y
                    | block 9: a b q r         |      shares four tokens with block 7, two with block 9

A block may hold fewer tokens than fit: the end of a sequence. The blocks of one parent are a linked list
in two arrays, the one found last first, so that adding and removing one are O(1).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

NO_BLOCK = -1
# Of one parent's blocks, those added last: at the root there may be thousands.
MOST_COMPARED = 32
# Neither is a token: nothing stands there, and nothing is wanted there.
NOTHING, ANYTHING_ELSE = -1, -2


class Branches:
    """Of each block that can be found: its parent's key and its tokens. Owns no block."""

    def __init__(self, num_blocks: int, block_size: int):
        self._block_size = block_size
        # One column more than tokens: there every block differs from what is wanted. Pages are touched only as blocks are filled.
        self._tokens: Tokens = np.zeros((num_blocks, block_size + 1), dtype=np.int32)
        self._wanted: Tokens = np.full(block_size + 1, ANYTHING_ELSE, dtype=np.int32)
        self._parent_of: list[bytes | None] = [None] * num_blocks
        # By a parent's first byte, for the reason given in PrefixIndex.
        self._newest: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._newer = array("i", [NO_BLOCK]) * num_blocks
        self._older = array("i", [NO_BLOCK]) * num_blocks

    def add(self, parent: bytes, block: int) -> None:
        """``block``, which is not here, can be found behind ``parent``; what it holds is for :meth:`fill` to say."""
        newest = self._newest[parent[0]]
        older = newest.get(parent, NO_BLOCK)
        if older != NO_BLOCK:
            self._newer[older] = block
        self._older[block], self._newer[block] = older, NO_BLOCK
        self._parent_of[block] = parent
        newest[parent] = block

    def remove(self, block: int) -> None:
        """``block`` can't be found any more. Nothing happens if it is not here."""
        parent = self._parent_of[block]
        if parent is None:
            return
        self._parent_of[block] = None
        older, newer = self._older[block], self._newer[block]
        if older != NO_BLOCK:
            self._newer[older] = newer
        if newer != NO_BLOCK:
            self._older[newer] = older
        elif older != NO_BLOCK:
            self._newest[parent[0]][parent] = older
        else:
            del self._newest[parent[0]][parent]

    def clear(self) -> None:
        for newest in self._newest:
            newest.clear()
        self._parent_of = [None] * len(self._parent_of)

    def fill(self, blocks: list[int], tokens: Tokens) -> None:
        """``blocks`` hold ``tokens``, one after the other: each of them a whole block, or one block fewer."""
        if len(tokens) < self._block_size:
            row = self._tokens[blocks[0]]
            row[: len(tokens)] = tokens
            row[len(tokens) :] = NOTHING
        else:
            self._tokens[blocks, :-1] = tokens.reshape(len(blocks), self._block_size)

    def longest(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """The block behind ``parent`` that begins with most of ``tokens``, at most a block of them, and how many.

        Of equally good ones the one added last; (NO_BLOCK, 0) where there is none.
        """
        block = self._newest[parent[0]].get(parent, NO_BLOCK)
        if block == NO_BLOCK:
            return NO_BLOCK, 0
        blocks: list[int] = []
        while block != NO_BLOCK and len(blocks) < MOST_COMPARED:
            blocks.append(block)
            block = self._older[block]
        count = min(len(tokens), self._block_size)
        self._wanted[:count] = tokens[:count]
        self._wanted[count:] = ANYTHING_ELSE
        lengths = (self._tokens[blocks] != self._wanted).argmax(axis=1)
        best = int(lengths.argmax())
        length = int(lengths[best])
        return (blocks[best], length) if length else (NO_BLOCK, 0)

    def check(self, findable: Iterable[int]) -> None:
        """Raise AssertionError unless the lists hold together and have no block that is not among ``findable``."""
        found = []
        for newest in self._newest:
            for parent, first in newest.items():
                newer, block = NO_BLOCK, first
                while block != NO_BLOCK:
                    assert self._newer[block] == newer, f"block {block} stands behind {newer}, and its link says {self._newer[block]}"
                    assert self._parent_of[block] == parent, f"block {block} stands behind another parent than its own"
                    found.append(block)
                    newer, block = block, self._older[block]
        assert len(set(found)) == len(found), "a block branches off twice"
        assert len(found) == sum(parent is not None for parent in self._parent_of), "a block has a parent and is in no list"
        assert set(found) <= set(findable), "a block branches off that can't be found"
