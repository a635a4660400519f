"""Sequences and their blocks: keys, hits, growth, claims."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.cache.branches import Tokens
from fastengine.cache.kv_cache_manager import NO_HITS, KVCacheManager, SequenceBlocks
from fastengine.cache.prefix_index import chain_keys, root_key

ROOT = root_key(0, "", "")
SIZE = 4


def packed(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def unpacked(tokens: bytes) -> Tokens:
    return np.frombuffer(tokens, dtype="<i4")


def admitted(kv: KVCacheManager, tokens: bytes, root: bytes = ROOT) -> tuple[SequenceBlocks, int]:
    sequence = SequenceBlocks()
    kv.identify(sequence, root, tokens)
    hits = kv.lookup(sequence, len(tokens) // 4)
    kv.allocate(sequence, hits, unpacked(tokens))
    return sequence, len(hits)


def register(kv: KVCacheManager, sequence: SequenceBlocks, tokens: bytes, num_tokens: int) -> None:
    kv.register(sequence, unpacked(tokens)[:num_tokens])


def test_keys_depend_on_everything_before_and_on_the_root() -> None:
    one = chain_keys(ROOT, packed(*range(8)), 16)
    assert len(one) == 2
    assert chain_keys(ROOT, packed(*range(9)), 16) == one
    changed = chain_keys(ROOT, packed(9, *range(1, 8)), 16)
    assert changed[0] != one[0]
    assert changed[1] != one[1]
    roots = {root_key(0, "", ""), root_key(1, "", ""), root_key(0, "a", ""), root_key(0, "", "a"), root_key(0, "ab", ""), root_key(0, "a", "b")}
    assert len(roots) == 6


def test_a_prefix_is_found_once_it_is_registered_and_never_the_last_token() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    tokens = packed(*range(12))
    first, hits = admitted(kv, tokens)
    assert hits == 0
    probe = SequenceBlocks()
    kv.identify(probe, ROOT, tokens)
    assert kv.lookup(probe, 12).blocks == []
    assert kv.is_being_computed(probe, 0)
    register(kv, first, tokens, 7)
    assert kv.lookup(probe, 12).blocks == first.block_ids[:1]
    assert kv.is_being_computed(probe, 1)
    register(kv, first, tokens, 12)
    # All three blocks are known, but the last token must be left to compute.
    assert kv.lookup(probe, 12).blocks == first.block_ids[:2]
    assert not kv.is_being_computed(probe, 2)
    second, hits = admitted(kv, tokens)
    assert hits == 2
    assert second.block_ids[:2] == first.block_ids[:2]
    kv.check([first, second])
    kv.release(first)
    kv.release(second)
    kv.check([])
    assert kv.num_available == 20


def test_a_claim_ends_with_its_owner() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    tokens = packed(*range(9))
    first, _ = admitted(kv, tokens)
    probe = SequenceBlocks()
    kv.identify(probe, ROOT, tokens)
    assert kv.is_being_computed(probe, 0)
    kv.release(first)
    assert not kv.is_being_computed(probe, 0)


def test_what_decoding_filled_is_found_once_it_is_identified_and_registered() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    # The second prompt fills its only block: the key that it has must stay the first of its chain.
    for tokens in [(1, 2, 3), (7, 7, 7, 7)]:
        sequence, _ = admitted(kv, packed(*tokens))
        register(kv, sequence, packed(*tokens), len(tokens))
        assert kv.grow_decoding([sequence]) == sequence.block_ids[1:]
        probe = SequenceBlocks()
        known = packed(*tokens, 9, 9, 9, 9, 9)
        kv.identify(probe, ROOT, known)
        assert kv.lookup(probe, 8).blocks == (sequence.block_ids[:1] if len(tokens) == SIZE else [])
        kv.identify(sequence, ROOT, known)
        register(kv, sequence, known, len(tokens) + 4)
        assert kv.lookup(probe, len(known) // 4).blocks == sequence.block_ids[: (len(tokens) + 4) // SIZE]
        kv.check([sequence])
        kv.release(sequence)


def test_can_allocate_counts_hits_that_nobody_holds() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True)
    tokens = packed(*range(9))
    first, _ = admitted(kv, tokens)
    register(kv, first, tokens, 9)
    kv.release(first)
    probe = SequenceBlocks()
    kv.identify(probe, ROOT, packed(*range(16)))
    hits = kv.lookup(probe, 16)
    assert len(hits) == 2
    assert kv.can_allocate(hits, 16, 0)
    assert not kv.can_allocate(hits, 16, 1)
    assert not kv.can_allocate(hits, 17, 0)


def test_flush_and_disown_hide_what_runs() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    tokens = packed(*range(9))
    first, _ = admitted(kv, tokens)
    register(kv, first, tokens, 9)
    assert kv.flush([first]) == 3  # two blocks and a part of one
    assert admitted(kv, tokens)[1] == 0
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    first, _ = admitted(kv, tokens)
    register(kv, first, tokens, 9)
    tokens = packed(*range(8), 50, 51, 52, 53, 54)
    second, _ = admitted(kv, tokens)
    register(kv, second, tokens, 13)
    kv.disown(second, 2)
    third = SequenceBlocks()
    kv.identify(third, ROOT, tokens)
    assert kv.lookup(third, 13).blocks == first.block_ids[:2]
    kv.release(second)
    kv.check([first])


def test_without_caching_nothing_has_keys() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=False)
    first, _ = admitted(kv, packed(*range(12)))
    register(kv, first, packed(*range(12)), 12)
    kv.grow_decoding([first])
    kv.release(first)
    assert admitted(kv, packed(*range(12)))[1] == 0
    assert len(kv.index) == 0


def test_a_sequence_with_blocks_can_not_be_admitted_again() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    first, _ = admitted(kv, packed(1))
    with pytest.raises(AssertionError):
        kv.allocate(first, NO_HITS, unpacked(packed(1)))
