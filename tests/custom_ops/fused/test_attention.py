"""Attention of the fused step: any shape against the formulas, and any way to share the work against any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastengine.custom_ops.fused import KvType, Layout, Source, SourceKind

from .test_step import relative_error
from .tiny import Row, TinyCache, TinyModel, step

# Relative to the logits' standard deviation.
TOLERANCE = {KvType.FLOAT32: 2e-4, KvType.BFLOAT16: 0.03, KvType.INT8: 0.06}
HEADS = [(1, 1), (3, 3), (4, 2), (9, 3), (7, 1), (8, 2), (24, 1)]


def cache_and_blocks(model: TinyModel, kv_type: KvType, block_size: int, length: int, seed: int) -> tuple[TinyCache, list[int]]:
    """A cache whose unused memory is not zero, and a block table in no order."""
    rng = np.random.default_rng(seed)
    num_blocks = -(-length // block_size)
    cache = TinyCache(kv_type, model.shape, num_blocks + 3, block_size)
    for pool in cache.pools:
        pool.reshape(-1).view(np.uint8)[:] = rng.integers(0, 100, pool.nbytes, np.uint8)
    for scale in cache.scales:
        scale[:] = np.nan
    return cache, rng.permutation(num_blocks + 3)[:num_blocks].tolist()


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 32, 48, 64, 96, 128]),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    length=st.sampled_from([1, 15, 64, 127, 128, 129, 203, 300]),
    interleaved=st.booleans(),
)
@pytest.mark.parametrize("kv_type", list(KvType))
def test_any_shape_equals_the_formulas(
    isa: str, kv_type: KvType, heads: tuple[int, int], head_dim: int, block_size: int, length: int, interleaved: bool
) -> None:
    model = TinyModel(Layout.FLOAT32, isa, interleaved=interleaved, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    tokens = np.random.default_rng(length).integers(0, 300, length)
    cache, blocks = cache_and_blocks(model, kv_type, block_size, length, seed=7)
    got = step(model.fused, cache, [Row(tokens, 0, blocks)])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[kv_type]
    model.fused.close()


@pytest.mark.parametrize("kv_type", list(KvType))
def test_threads_that_share_a_context_change_nothing(isa: str, kv_type: KvType) -> None:
    """The last tokens of a long sequence, one by one and in small chunks, with few and many threads, alone and beside another."""
    model = TinyModel(Layout.INT8, isa, num_heads=6, num_kv_heads=2)
    rng = np.random.default_rng(8)
    tokens, short = rng.integers(0, 300, 700), rng.integers(0, 300, 40)
    model.fused.num_threads = 1
    cache, blocks = cache_and_blocks(model, kv_type, 32, 700, seed=8)
    alone = step(model.fused, cache, [Row(tokens, 0, blocks)])
    cache, blocks = cache_and_blocks(model, kv_type, 32, 700, seed=9)
    step(model.fused, cache, [Row(tokens[:640], 0, blocks)])
    done = 640
    spare = sorted(set(range(len(cache.pools[0]))) - set(blocks))
    for threads, length, beside in ((1, 1, False), (2, 1, False), (5, 1, True), (3, 11, False), (5, 2, True), (4, 44, False)):
        model.fused.num_threads = threads
        rows = [Row(short, 0, spare)] if beside else []
        rows.append(Row(tokens[done : done + length], done, blocks))
        np.testing.assert_array_equal(step(model.fused, cache, rows)[-length:], alone[done : done + length])
        done += length
    model.fused.close()


@pytest.mark.parametrize("kv_type", list(KvType))
@pytest.mark.parametrize("num_heads", [3, 4])
def test_where_a_prompt_is_cut_changes_no_bit(isa: str, kv_type: KvType, num_heads: int) -> None:
    """Also where rows that see nothing of a chunk of 128 positions are computed together with rows that do."""
    model = TinyModel(Layout.FLOAT32, isa, num_heads=num_heads, num_kv_heads=1)
    tokens = np.random.default_rng(10).integers(0, 300, 270)
    cache, blocks = cache_and_blocks(model, kv_type, 32, tokens.size, seed=10)
    whole = step(model.fused, cache, [Row(tokens, 0, blocks)])
    for cut in (1, 2, 3, 127, 128, 129, 254, 255):
        cache, blocks = cache_and_blocks(model, kv_type, 32, tokens.size, seed=cut)
        parts = [step(model.fused, cache, [Row(part, at, blocks)]) for part, at in ((tokens[:cut], 0), (tokens[cut:], cut))]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    model.fused.close()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("before", [5, 21])
def test_outputs_that_are_quantized_at_once_or_later_are_the_same(isa: str, layout: Layout, before: int) -> None:
    """A prompt whose tasks' rows are whole tiles, and then partly are: they begin behind another prompt's."""
    model = TinyModel(layout, isa, num_heads=3, num_kv_heads=1)
    rng = np.random.default_rng(11)
    tokens, other = rng.integers(0, 300, 600), rng.integers(0, 300, before)
    cache, blocks = cache_and_blocks(model, KvType.INT8, 32, tokens.size, seed=11)
    alone = step(model.fused, cache, [Row(tokens, 0, blocks)])
    cache, blocks = cache_and_blocks(model, KvType.INT8, 32, tokens.size, seed=12)
    spare = sorted(set(range(len(cache.pools[0]))) - set(blocks))
    np.testing.assert_array_equal(step(model.fused, cache, [Row(other, 0, spare), Row(tokens, 0, blocks)])[before:], alone)
    model.fused.close()


@pytest.mark.parametrize("kv_type", list(KvType))
def test_values_of_zero_and_of_different_size(isa: str, kv_type: KvType) -> None:
    """Value rows that are zero or a thirtieth of the others' size, as at the first token of real models."""
    model = TinyModel(Layout.FLOAT32, isa, num_layers=1)
    shape = model.shape
    table = model.weights["embedding", -1].copy()
    table[:2] = 0.0
    table[2:4] *= 1e-3
    model.weights["embedding", -1] = table
    model.fused.set_rows("embedding", Source(table, SourceKind.FLOAT32, shape.vocab))
    tokens = np.concatenate([[0, 1], np.random.default_rng(9).integers(0, 300, 200), [2, 0, 3, 1]])
    cache, blocks = cache_and_blocks(model, kv_type, 16, tokens.size, seed=9)
    got = step(model.fused, cache, [Row(tokens, 0, blocks)])
    assert np.isfinite(got).all()
    assert relative_error(got, model.logits(tokens)) < 2 * TOLERANCE[kv_type]
    model.fused.close()


@pytest.mark.parametrize("keys", ["alike", "apart"])
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_values_that_are_alike_come_out_as_they_are(isa: str, head_dim: int, num_tokens: int, keys: str) -> None:
    """Whatever the weights, of a decode and of a prompt, and with the largest products and sums that there can be."""
    model = TinyModel(Layout.FLOAT32, isa, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=head_dim)
    rng = np.random.default_rng(12)
    block_size, length = 32, 300
    cache, blocks = cache_and_blocks(model, KvType.INT8, block_size, length, seed=12)
    cache.pools[0].view(np.uint8)[:] = 255 if keys == "alike" else rng.choice([1, 255], cache.pools[0].shape)
    signs = rng.choice([-1, 1], (1, 2, 1, head_dim, 1))
    cache.pools[1].view(np.int8).reshape(-1, 2, block_size // 4, head_dim, 4)[:] = 127 * signs
    cache.scales[0][:], cache.scales[1][:] = 0.003, 1 / 127
    tokens = rng.integers(0, 300, num_tokens).astype(np.int32)

    def logits(start: int) -> np.ndarray:
        end = start + num_tokens
        out = np.empty((num_tokens, model.shape.vocab), np.float32)
        model.fused.step(
            tokens,
            np.arange(start, end, dtype=np.int32),
            np.full(num_tokens, -1, np.int32),  # what the cache holds of them stays
            np.array([0, num_tokens], np.int32),
            np.array([end], np.int32),
            np.array([blocks], np.int32),
            np.arange(num_tokens, dtype=np.int32),
            cache.fused,
            logits=out,
        )
        return out

    first = logits(0)
    assert np.isfinite(first).all()
    for start in (1, 15, 127, 128, length - num_tokens):
        assert relative_error(logits(start), first) < 0.01
    model.fused.close()
