"""The host tier's books, and what goes down to it and comes back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.cache.host_tier import HostTier
from fastengine.cache.kv_cache_manager import ON_HOST, Hits, KVCacheManager, SequenceBlocks
from fastengine.cache.prefix_index import root_key

ROOT = root_key(0, "", "")
SIZE = 4


def packed(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def computed(kv: KVCacheManager, tokens: bytes) -> tuple[SequenceBlocks, Hits]:
    """A sequence that one plan has started and computed; its copies are still to be taken."""
    sequence = SequenceBlocks()
    kv.identify(sequence, ROOT, tokens)
    hits = kv.lookup(sequence, len(tokens) // 4)
    kv.allocate(sequence, hits, np.frombuffer(tokens, "<i4"))
    kv.register(sequence, np.frombuffer(tokens, "<i4"))
    return sequence, hits


def test_the_least_recently_used_block_is_given_to_another_key() -> None:
    host = HostTier(2)
    a, b = host.claim(b"a"), host.claim(b"b")
    assert {a, b} == {0, 1}
    assert host.claim(b"a") is None  # there already, and used just now
    assert host.claim(b"c") == b
    assert b"b" not in host
    assert host.num_evictions == 1
    host.check({})


def test_pinned_blocks_stay() -> None:
    host = HostTier(2)
    host.claim(b"a")
    host.claim(b"b")
    host.pin([b"a"])
    host.pin([b"a"])
    assert host.claim(b"c") is not None
    host.pin([b"c"])
    assert host.claim(b"d") is None
    host.unpin([b"a"])
    assert host.claim(b"d") is None
    host.check({b"a": 1, b"c": 1})
    with pytest.raises(AssertionError):
        host.check({b"a": 1})
    with pytest.raises(AssertionError):
        host.clear()
    host.unpin([b"a"])
    assert host.claim(b"d") is not None
    assert b"a" not in host
    host.unpin([b"c"])
    assert host.clear() == 2
    host.check({})


def test_unpinned_tails_are_evicted_first() -> None:
    host = HostTier(3)
    for key in (b"0", b"1", b"2"):
        host.claim(key)
    host.pin([b"0", b"1", b"2"])
    host.unpin([b"0", b"1", b"2"])
    host.claim(b"x")
    assert b"2" not in host
    assert b"0" in host


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("cpuf"), st.integers(0, 7)), max_size=60))
def test_random_claims_and_pins_balance(num_blocks: int, events: list[tuple[str, int]]) -> None:
    host = HostTier(num_blocks)
    pins: Counter[bytes] = Counter()
    for kind, number in events:
        key = bytes([number])
        if kind == "c":
            host.claim(key)
        elif kind == "p" and key in host:
            host.pin([key])
            pins[key] += 1
        elif kind == "u" and pins[key]:
            host.unpin([key])
            pins[key] -= 1
        elif kind == "f" and not +pins:
            host.clear()
        host.check(+pins)
        assert all(key in host for key in +pins)


def test_evicted_blocks_go_down_and_hits_come_back_in_one_plan() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True, num_host_blocks=8)
    tokens = packed(*range(12))
    first, _ = computed(kv, tokens)
    table = list(first.block_ids)
    kv.release(first)
    second, _ = computed(kv, packed(*range(50, 66)))
    swap_out, swap_in, _ = kv.take_swaps()
    # One block was blank; the three of the first sequence had to go, its tail first.
    assert swap_out[0::2] == table[::-1]
    assert swap_in == []
    kv.check([second])
    kv.release(second)
    again, hits = computed(kv, tokens)
    assert hits.blocks == [ON_HOST, ON_HOST]
    assert hits.on_device == []
    swap_out, swap_in, _ = kv.take_swaps()
    assert swap_in[1::2] == again.block_ids[:2]
    assert len(swap_out) == 3 * 2  # the three it needs were the second's
    kv.check([again])
    # What came back is on both sides: when it is evicted again nothing needs to be copied.
    kv.release(again)
    other, _ = computed(kv, packed(*range(80, 96)))
    swap_out, _, _ = kv.take_swaps()
    assert not set(again.keys[:2]) & {key for key, block in kv.host.block_of.items() if block in swap_out[1::2]}
    kv.check([other])


def test_a_prefix_may_lie_on_both_sides() -> None:
    kv = KVCacheManager(6, SIZE, enable_prefix_caching=True, num_host_blocks=8)
    first, _ = computed(kv, packed(*range(20)))
    kv.release(first)
    other, _ = computed(kv, packed(*range(50, 62)))
    assert len(kv.take_swaps()[0]) // 2 == 2
    kv.release(other)
    again, hits = computed(kv, packed(*range(20)))
    assert hits.blocks[3:] == [ON_HOST]
    assert ON_HOST not in hits.blocks[:3]
    assert hits.num_on_host == 1
    assert hits.with_at_most(0).blocks == hits.blocks[:3]
    assert hits.with_at_most(1) is hits
    assert again.block_ids[:3] == hits.blocks[:3]
    kv.take_swaps()
    kv.check([again])


def test_only_so_many_blocks_are_saved_in_one_plan() -> None:
    kv = KVCacheManager(6, SIZE, enable_prefix_caching=True, num_host_blocks=8, max_swaps=2)
    first, _ = computed(kv, packed(*range(24)))
    kv.release(first)
    second, _ = computed(kv, packed(*range(50, 74)))
    assert len(kv.take_swaps()[0]) // 2 == 2
    kv.release(second)
    assert len(kv.host) == 2
    kv.check([])


def test_a_host_smaller_than_one_plans_evictions_is_written_once_each() -> None:
    kv = KVCacheManager(6, SIZE, enable_prefix_caching=True, num_host_blocks=2)
    first, _ = computed(kv, packed(*range(24)))
    kv.release(first)
    computed(kv, packed(*range(50, 74)))
    swap_out, _, _ = kv.take_swaps()
    assert sorted(swap_out[1::2]) == [0, 1]


def test_reserved_places_keep_their_host_blocks_until_they_are_given_up() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True, num_host_blocks=4)
    first, _ = computed(kv, packed(*range(16)))
    kv.release(first)
    second, _ = computed(kv, packed(*range(50, 66)))
    kv.take_swaps()
    kv.release(second)
    restored = SequenceBlocks()
    kv.identify(restored, ROOT, packed(*range(16)))
    hits = kv.lookup(restored, 16)
    assert hits.num_on_host == 3
    missing = kv.reserve(restored, hits, len(hits))
    assert missing == [0, 1, 2]
    kv.swap_in(restored, 0, np.arange(16, dtype=np.int32))
    kv.take_swaps()
    kv.check([restored], [restored.keys[1], restored.keys[2]])
    kv.unpin(restored, [1, 2])
    kv.release(restored)
    kv.check([])
    assert kv.lookup(restored, 16).blocks[0] != ON_HOST


def test_parts_of_blocks_do_not_go_down() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True, num_host_blocks=8)
    first, _ = computed(kv, packed(*range(10)))
    assert len(kv.index) == 3
    kv.release(first)
    second, _ = computed(kv, packed(*range(50, 66)))
    swap_out, _, saved = kv.take_swaps()
    assert len(swap_out) == 2 * 2
    assert saved == first.keys[::-1]
    kv.check([second])


def test_flush_forgets_the_host_too() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True, num_host_blocks=8)
    first, _ = computed(kv, packed(*range(16)))
    kv.release(first)
    second, _ = computed(kv, packed(*range(50, 66)))
    kv.take_swaps()
    assert kv.flush([second]) == 4 + 4
    assert len(kv.host) == 0
    kv.release(second)
    _, hits = computed(kv, packed(*range(16)))
    assert len(hits) == 0
