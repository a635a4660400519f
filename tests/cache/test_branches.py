"""Which block goes on as a prompt does, and how far."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.cache.branches import MOST_COMPARED, NO_BLOCK, Branches, Tokens

SIZE = 4


def tokens_of(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def branches_of(*blocks: tuple[int, ...], parent: bytes = b"p") -> Branches:
    branches = Branches(len(blocks), SIZE)
    for block, tokens in enumerate(blocks):
        branches.add(parent, block)
        branches.fill([block], tokens_of(*tokens))
    return branches


def test_the_block_that_shares_most_is_found() -> None:
    branches = branches_of((1, 2, 3, 4), (1, 2, 9, 9), (7, 7, 7, 7))
    assert branches.longest(b"p", tokens_of(1, 2, 3, 5)) == (0, 3)
    assert branches.longest(b"p", tokens_of(1, 2, 9)) == (1, 3)
    assert branches.longest(b"p", tokens_of(1, 5)) == (1, 1)  # of equals the last one
    assert branches.longest(b"p", tokens_of(1, 2, 3, 4, 5, 6)) == (0, 4)
    assert branches.longest(b"p", tokens_of(8, 2, 3, 4)) == (NO_BLOCK, 0)
    assert branches.longest(b"q", tokens_of(1, 2, 3, 4)) == (NO_BLOCK, 0)


def test_a_part_of_a_block_ends_where_it_ends() -> None:
    branches = branches_of((1, 2, 3, 4))
    branches.fill([0], tokens_of(1, 2))
    assert branches.longest(b"p", tokens_of(1, 2, 3, 4)) == (0, 2)


def test_several_blocks_are_filled_at_once() -> None:
    branches = Branches(4, SIZE)
    branches.add(b"p", 3)
    branches.add(b"q", 1)
    branches.fill([3, 1], np.arange(8, dtype=np.int32))
    assert branches.longest(b"p", np.arange(9, dtype=np.int32)) == (3, 4)
    assert branches.longest(b"q", np.arange(4, 9, dtype=np.int32)) == (1, 4)


def test_of_many_blocks_the_last_ones_are_compared() -> None:
    branches = branches_of((1, 2, 3, 4), *[(1, 0, 0, block) for block in range(MOST_COMPARED)])
    assert branches.longest(b"p", tokens_of(1, 2, 3, 4)) == (MOST_COMPARED, 1)
    branches.remove(MOST_COMPARED)
    assert branches.longest(b"p", tokens_of(1, 2, 3, 4)) == (0, 4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aarrfl"), st.integers(0, 7), st.lists(st.integers(0, 2), min_size=1, max_size=SIZE + 2)), max_size=60))
def test_the_same_as_comparing_with_every_block(events: list[tuple[str, int, list[int]]]) -> None:
    branches = Branches(8, SIZE)
    held: dict[int, tuple[bytes, list[int]]] = {}  # the one added last at the end
    for kind, block, tokens in events:
        parent = bytes([block % 2])
        if kind == "a" and block not in held:
            held[block] = parent, tokens[:SIZE]
            branches.add(parent, block)
            branches.fill([block], tokens_of(*tokens[:SIZE]))
        elif kind == "r":
            held.pop(block, None)
            branches.remove(block)
        elif kind == "f" and block == 0:
            held.clear()
            branches.clear()
        branches.check(held)
        best = (NO_BLOCK, 0)
        for candidate, (its_parent, its_tokens) in reversed(held.items()):
            count = 0
            while count < min(len(tokens), len(its_tokens)) and its_tokens[count] == tokens[count]:
                count += 1
            if its_parent == parent and count > best[1]:
                best = candidate, count
        assert branches.longest(parent, tokens_of(*tokens)) == best
