"""The block pool's books: every block is blank, retained or owned, and references equal holders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.cache.block_pool import BlockPool, OutOfBlocks
from fastengine.cache.prefix_index import PrefixIndex


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixIndex, list[tuple[int, bytes]]]:
    index = PrefixIndex(num_blocks, 1)
    evicted: list[tuple[int, bytes]] = []
    return BlockPool(num_blocks, index, lambda blocks, keys: evicted.extend(zip(blocks, keys, strict=True))), index, evicted


def test_allocate_gives_each_block_once_and_refuses_more() -> None:
    pool, _, _ = make_pool(5)
    assert sorted(pool.allocate(3) + pool.allocate(2)) == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 available of 5"):
        pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_refused_allocation_takes_nothing() -> None:
    pool, _, _ = make_pool(5)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.num_available == 2
    pool.check(Counter(held))


def test_released_blocks_with_a_key_are_retained_and_evicted_tail_first_oldest_first() -> None:
    pool, index, evicted = make_pool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    for i, block in enumerate(first + second):
        index.register(bytes([i]), block, b"parent")
    pool.release(first)
    pool.release(second)
    assert (pool.num_blank, pool.num_retained) == (1, 5)
    pool.allocate(4)
    # One blank block, then the tail, middle and head of the first sequence.
    assert evicted == [(first[2], b"\2"), (first[1], b"\1"), (first[0], b"\0")]
    assert index.match([b"\3", b"\4"], 2) == second
    assert index.match([b"\0"], 1) == []


def test_acquiring_a_retained_block_saves_it_from_eviction() -> None:
    pool, index, _ = make_pool(2)
    (block,) = pool.allocate(1)
    index.register(b"k", block, b"parent")
    pool.release([block])
    assert pool.num_unowned([block]) == 1
    pool.acquire([block])
    pool.acquire([block])
    assert pool.num_unowned([block]) == 0
    pool.allocate(1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1


def test_releasing_too_often_is_an_error() -> None:
    pool, _, _ = make_pool(2)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(held)


def test_forget_makes_a_retained_block_blank_and_leaves_an_owned_one_owned() -> None:
    pool, index, _ = make_pool(2)
    one, two = pool.allocate(2)
    index.register(b"1", one, b"parent")
    index.register(b"2", two, b"parent")
    pool.release([one])
    pool.forget(one)
    pool.forget(two)
    assert (pool.num_blank, pool.num_retained, len(index)) == (1, 0, 0)
    pool.check({two: 1})


def test_forget_all() -> None:
    pool, index, _ = make_pool(4)
    held = pool.allocate(3)
    for block in held:
        index.register(bytes([block]), block, b"parent")
    pool.release(held[:2])
    assert pool.forget_all() == 3
    assert (pool.num_blank, pool.num_retained) == (3, 0)
    pool.check({held[2]: 1})
    pool.release(held[2:])
    pool.forget_all()
    assert sorted(pool.allocate(2)) == [0, 1], "as at the start, the lowest first"


def test_check_notices_what_is_wrong() -> None:
    pool, _, _ = make_pool(2)
    (held,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.check({held: 2})
    pool.references[held] = 0
    with pytest.raises(AssertionError, match="!= 2 blocks"):
        pool.check({})


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from("ahrfk"), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_random_holders_balance(num_blocks: int, events: list[tuple[str, int, int]]) -> None:
    pool, index, _ = make_pool(num_blocks)
    sequences: list[list[int]] = []
    for kind, a, b in events:
        if kind == "a" and a <= pool.num_available:
            sequences.append(pool.allocate(a))
        elif kind == "h" and len(index):
            hit = [block for block, key in enumerate(index.key_of) if key is not None][: a + 1]
            pool.acquire(hit)
            sequences.append(hit)
        elif kind == "r" and sequences:
            pool.release(sequences.pop(a % len(sequences)))
        elif kind == "f":
            pool.forget(a % num_blocks)
        elif kind == "k" and sequences and sequences[a % len(sequences)]:
            block = sequences[a % len(sequences)][0]
            if index.key_of[block] is None:
                index.register(bytes([b]), block, b"parent")
        pool.check(Counter(block for sequence in sequences for block in sequence))
