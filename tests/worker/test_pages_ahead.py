"""KV memory is taken before it is written, as far as it is next, and what it holds stays."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence
from fastengine.protocol.tokens import pack_token_ids
from fastengine.worker import pages_ahead
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.memory import Storage

SHAPE = KVShape(num_layers=2, num_kv_heads=4, block_size=64, head_dim=64, dtype="int8")  # 16 KiB of keys a block
NUM_BLOCKS = 2048


def taken(storage: Storage, first: int, end: int) -> float:
    """The share of the pages of these rows that are in memory."""
    begin = storage.address + first * storage.bytes_per_row
    begin -= begin % mmap.PAGESIZE
    size = storage.address + end * storage.bytes_per_row - begin
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.fixture
def cache() -> KVCache:
    return KVCache(SHAPE, NUM_BLOCKS, 0, "cpu")


def take_all(cache: KVCache, num_used: int) -> int:
    """How many pieces there were."""
    count = 0
    while cache.take_pages_ahead(num_used):
        count += 1
    return count


def test_an_eighth_of_the_pool_is_taken_ahead_of_what_is_used(cache):
    pools = [storage for layer in cache.layers for storage in layer.storages()]
    key = cache.layers[1].key
    assert taken(key, 256, 512) < 1
    assert take_all(cache, 0) == 2 * len(pools)  # pieces of 128 blocks
    assert [taken(pool, 0, 256) for pool in pools] == [1.0] * len(pools)
    assert taken(key, 1024, NUM_BLOCKS) == 0
    assert take_all(cache, 0) == 0
    assert take_all(cache, 300) > 0
    assert [taken(pool, 0, 556) for pool in pools] == [1.0] * len(pools)
    assert taken(key, 1024, NUM_BLOCKS) == 0
    assert take_all(cache, NUM_BLOCKS) > 0
    assert taken(key, 0, NUM_BLOCKS) == 1
    assert take_all(cache, NUM_BLOCKS) == 0


def test_what_is_there_stays(cache):
    rows = cache.layers[0].key.rows()
    rows[:200] = np.arange(200, dtype=np.uint8)[:, None]
    take_all(cache, 200)
    assert (rows[:200] == np.arange(200, dtype=np.uint8)[:, None]).all()
    assert not rows[200:].any()


def test_no_more_than_a_bound(cache, monkeypatch):
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 64 * SHAPE.bytes_per_block)
    cache.drop()
    assert not cache.take_pages_ahead(0)  # of memory that is not there
    cache.allocate()
    take_all(cache, 0)
    key = cache.layers[0].key
    assert taken(key, 0, 64) == 1
    assert taken(key, 512, NUM_BLOCKS) == 0


def test_a_system_that_refuses_is_not_asked_again(cache, monkeypatch):
    asked: list[int] = []

    def refuse(storage: Storage, first: int, end: int) -> bool:
        asked.append(first)
        return False

    monkeypatch.setattr(Storage, "take_pages", refuse)
    assert not cache.take_pages_ahead(0)
    assert not cache.take_pages_ahead(NUM_BLOCKS)
    assert asked == [0]


def test_blocks_reached_are_those_named_since_the_memory_was_taken():
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=8, vocab_size=10)
    assert batch.num_blocks_reached == 0
    tokens, sampling = pack_token_ids([1, 2]), SamplingParams()
    assert (
        batch.start(StartedSequence(slot=0, token_ids=tokens, num_prompt=2, num_computed=0, block_ids=pack_token_ids([4]), sampling=sampling)) is None
    )
    assert batch.num_blocks_reached == 5
    batch.grow(np.array([0], np.int32), np.array([9], np.int32))
    batch.release(np.array([0], np.int32))
    assert batch.num_blocks_reached == 10, "what was used once stays taken"
