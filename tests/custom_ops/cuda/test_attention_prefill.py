"""Paged prefill attention (whole kernels, tensor-core instructions emulated) against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.custom_ops.cuda.attention_case import Case, Shape
from tests.custom_ops.cuda.memory import Kernels

SHAPES = [
    Shape(heads=1, kv_heads=1),
    Shape(heads=3, kv_heads=1, dtype="float16", cache="float16", sinks=True),
    Shape(heads=4, kv_heads=2, size=96, value_size=96, window=9),
    Shape(heads=2, kv_heads=1, size=128, value_size=128, block_size=64, window=40, sinks=True),
    Shape(heads=2, kv_heads=1, size=128, value_size=128, cache="int8"),
    Shape(heads=2, kv_heads=2, size=192, value_size=128, dtype="float16", cache="fp8"),
    Shape(heads=1, kv_heads=1, size=192, value_size=192, block_size=8),
    Shape(heads=1, kv_heads=1, size=256, value_size=256, block_size=32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_decodes_mix(cuda: Kernels, rng: np.random.Generator, shape: Shape) -> None:
    """A first chunk, a chunk over cached context that ends within a tile, a decode, and an empty sequence."""
    Case(rng, shape, [2, 50, 1, 0, 5], [2, 97, 70, 5, 133]).assert_right(cuda)


WIDE_SHAPES = [
    Shape(heads=1, kv_heads=1, wide=True),
    Shape(heads=6, kv_heads=2, dtype="float16", cache="float16", sinks=True, wide=True),
    Shape(heads=4, kv_heads=1, size=128, value_size=128, block_size=64, window=40, wide=True),
    Shape(heads=7, kv_heads=1, size=128, value_size=128, block_size=8, dtype="float16", cache="float16", window=150, sinks=True, wide=True),
]


@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_by_wgmma(cuda: Kernels, rng: np.random.Generator, shape: Shape) -> None:
    """First chunks, chunks over cached context that begin and end within a step, several tiles and steps, a decode, an empty sequence."""
    Case(rng, shape, [2, 50, 1, 0, 5], [2, 97, 70, 5, 300]).assert_right(cuda)
    Case(rng, shape, [140], [400]).assert_right(cuda)


def test_by_wgmma_only_where_there_is_such(cuda: Kernels, rng: np.random.Generator) -> None:
    """Other sizes and 8-bit caches go by mma, and so does all on another card."""
    Case(rng, Shape(size=96, value_size=96, wide=True), [9], [30]).assert_right(cuda)
    Case(rng, Shape(cache="int8", wide=True), [9], [30]).assert_right(cuda)
    cuda.operators.library.fe_shim_set_multiprocessor_shared(100 * 1024)
    try:
        # Its 128 tokens a step would not fit here.
        Case(rng, Shape(size=128, value_size=128, wide=True), [9], [30]).assert_right(cuda)
    finally:
        cuda.operators.library.fe_shim_set_multiprocessor_shared(228 * 1024)


def test_large_scores_do_not_overflow_by_wgmma(cuda: Kernels, rng: np.random.Generator) -> None:
    case = Case(rng, Shape(dtype="float16", cache="float16", sinks=True, wide=True), [20], [200], spread=60.0)
    np.testing.assert_allclose(case.run(cuda), case.expected(), rtol=0.01, atol=0.01)


def test_a_prompt_of_several_tiles(cuda: Kernels, rng: np.random.Generator) -> None:
    Case(rng, Shape(heads=5, kv_heads=1), [60], [60]).assert_right(cuda)
    Case(rng, Shape(heads=1, kv_heads=1, window=70), [150], [200]).assert_right(cuda)


def test_large_scores_do_not_overflow(cuda: Kernels, rng: np.random.Generator) -> None:
    case = Case(rng, Shape(dtype="float16", cache="float16", sinks=True), [20], [100], spread=60.0)
    np.testing.assert_allclose(case.run(cuda), case.expected(), rtol=0.01, atol=0.01)


def test_sizes_without_a_kernel_are_refused(cuda: Kernels, rng: np.random.Generator) -> None:
    with pytest.raises(RuntimeError, match="paged_attention: no kernel covers"):
        Case(rng, Shape(size=112, value_size=112), [4], [4]).run(cuda)
