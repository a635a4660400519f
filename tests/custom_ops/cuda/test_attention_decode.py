"""Paged decode attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops.cuda import abi
from tests.custom_ops.cuda.attention_case import Case, Shape
from tests.custom_ops.cuda.memory import Kernels

SHAPES = [
    Shape(heads=1, kv_heads=1),
    Shape(heads=4, kv_heads=2, size=128, value_size=128, dtype="float16", cache="float16"),
    Shape(heads=3, kv_heads=1, size=96, value_size=96, block_size=32),
    Shape(heads=7, kv_heads=1, size=128, value_size=128, block_size=64),
    Shape(heads=9, kv_heads=1, size=64, block_size=8),
    Shape(heads=2, kv_heads=1, size=192, value_size=128),
    Shape(heads=4, kv_heads=1, size=256, value_size=256),
    Shape(heads=5, kv_heads=1, size=256, value_size=256, cache="int8"),
    Shape(heads=4, kv_heads=2, size=64, cache="int8", window=50),
    Shape(heads=4, kv_heads=2, size=128, value_size=128, cache="fp8", dtype="float16", sinks=True),
    Shape(heads=2, kv_heads=2, size=80, value_size=48, cache="fp8", block_size=32),
    Shape(heads=4, kv_heads=2, window=70, sinks=True),
    Shape(heads=4, kv_heads=2, window=300),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(cuda: Kernels, rng: np.random.Generator, shape: Shape) -> None:
    Case(rng, shape, [1, 1, 1, 1], [1, 63, 130, 300]).assert_right(cuda, max_query_tokens=1)


def test_many_pieces_of_a_long_context(cuda: Kernels, rng: np.random.Generator) -> None:
    """Past 32 * 256 tokens the pieces grow instead of their number."""
    Case(rng, Shape(heads=2, kv_heads=1, size=16, value_size=16), [1, 1], [8900, 700]).assert_right(cuda, max_query_tokens=1)


@pytest.mark.parametrize("wide", [False, True])
def test_the_order_of_threads_and_blocks_changes_no_bit(shim: abi.Operators, wide: bool) -> None:
    """Several pieces of a decode added up, and tiles of a prefill, under orders as different as they get."""
    shape, results = Shape(heads=4, kv_heads=2, sinks=True, wide=wide), []
    for order in (0, 1, 5, 6):
        shim.library.fe_shim_set_schedule(order)
        results.append(Case(np.random.default_rng(8), shape, [1, 70, 1], [900, 200, 513]).run(Kernels(shim)))
    shim.library.fe_shim_set_schedule(2)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_large_scores_do_not_overflow(cuda: Kernels, rng: np.random.Generator) -> None:
    case = Case(rng, Shape(dtype="float16", cache="float16", sinks=True), [1, 1], [300, 40], spread=60.0)
    np.testing.assert_allclose(case.run(cuda, 1), case.expected(), rtol=0.01, atol=0.01)


def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(cuda: Kernels) -> None:
    shape = Shape(heads=4, kv_heads=2, size=64)
    together = Case(np.random.default_rng(3), shape, [1], [600]).run(cuda, 1)

    alone = Case(np.random.default_rng(3), shape, [1], [600])
    batch = Case(np.random.default_rng(4), shape, [1, 1, 1], [77, 600, 5])
    # The same sequence in the middle of another batch, in other blocks.
    for which in range(2):
        blocks = np.arange(600) // shape.block_size
        source = alone.caches[which].stored[alone.tables.stored[0, blocks], :, np.arange(600) % shape.block_size]
        batch.caches[which].stored[batch.tables.stored[1, blocks], :, np.arange(600) % shape.block_size] = source
    batch.query.stored[1] = alone.query.stored[0]
    np.testing.assert_array_equal(batch.run(cuda, 1)[1], together[0])
