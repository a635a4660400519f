from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastengine import custom_ops as ops
from fastengine.custom_ops import reference
from tests.custom_ops.helpers import Heads, assert_close, assert_identical, make_batch, tensor

MIXED_QUERIES = [1, 7, 0, 1, 130, 1, 64, 1]
MIXED_CONTEXTS = [1, 7, 5, 600, 200, 64, 321, 513]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 40, 128])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64, 64),
        Heads(4, 4, 16, 16),
        Heads(5, 1, 128, 128),
        Heads(2, 1, 256, 256),
        Heads(3, 3, 32, 16),
        Heads(6, 2, 20, 28),
        Heads(12, 2, 80, 72),
    ],
    ids=str,
)
def test_ragged_mix_matches_the_reference(rng: np.random.Generator, heads: Heads, block_size: int, dtype: str) -> None:
    batch = make_batch(rng, heads, block_size, MIXED_QUERIES, MIXED_CONTEXTS, dtype)
    scale = heads.size**-0.5
    assert_close(ops.paged_attention(*batch.args(), scale), reference.paged_attention(*batch.args(), scale))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [1, 5, 64, 100, 511, 4096])
def test_sliding_window_sees_the_last_tokens_only(rng: np.random.Generator, window: int) -> None:
    batch = make_batch(rng, Heads(4, 2, 32, 32), 16, MIXED_QUERIES, MIXED_CONTEXTS)
    expected = reference.paged_attention(*batch.args(), 0.2, window)
    assert_close(ops.paged_attention(*batch.args(), 0.2, window), expected)


@pytest.mark.usefixtures("isa")
def test_window_needs_no_block_before_it(rng: np.random.Generator) -> None:
    batch = make_batch(rng, Heads(2, 1, 16, 16), 16, [1, 3], [100, 100])
    expected = ops.paged_attention(*batch.args(), 0.25, 20)
    tables = batch.block_tables.numpy().copy()
    tables[:, :4] = -1
    args = (*batch.args()[:3], tensor(tables, "int32"), *batch.args()[4:])
    assert_identical(ops.paged_attention(*args, 0.25, 20), expected)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequence_alone_equals_sequence_in_a_batch(rng: np.random.Generator, dtype: str) -> None:
    batch = make_batch(rng, Heads(9, 3, 64, 64), 16, MIXED_QUERIES, [*MIXED_CONTEXTS[:3], 2100, *MIXED_CONTEXTS[4:]], dtype)
    together = ops.paged_attention(*batch.args(), 0.125)
    starts = batch.query_starts.numpy()
    for seq in range(len(MIXED_QUERIES)):
        alone = ops.paged_attention(*batch.only(seq).args(), 0.125)
        assert_identical(alone, together[int(starts[seq]) : int(starts[seq + 1])])


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_changes_nothing(rng: np.random.Generator) -> None:
    batch = make_batch(rng, Heads(8, 2, 64, 64), 16, [1] * 9 + [90], [1500 + 10 * i for i in range(10)])
    results = []
    for threads in (1, 2, 3):
        ops.set_num_threads(threads)
        results.append(ops.paged_attention(*batch.args(), 0.125))
    assert_identical(results[0], results[1])
    assert_identical(results[0], results[2])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("length", [1, 9])
def test_extreme_scores_give_no_nan(rng: np.random.Generator, length: int) -> None:
    batch = make_batch(rng, Heads(3, 1, 32, 32), 16, [length], [150])
    query = paddle.sign(batch.query) * 1e15
    args = (query, *batch.args()[1:])
    assert_close(ops.paged_attention(*args, 1.0), reference.paged_attention(*args, 1.0))


@pytest.mark.usefixtures("isa")
def test_no_tokens_at_all(rng: np.random.Generator) -> None:
    batch = make_batch(rng, Heads(2, 1, 16, 16), 16, [0, 0], [4, 0])
    assert ops.paged_attention(*batch.args(), 1.0).shape == [0, 2, 16]


BAD_ATTENTION = {
    "query": tensor(np.zeros((2, 3, 16))),
    "key_cache": tensor(np.zeros((4, 2, 8, 24))),
    "value_cache": tensor(np.zeros((4, 2, 9, 16))),
    "block_tables": tensor([[0, 9], [2, 3]], "int32"),
    "query_starts": tensor([0, 1, 3], "int32"),
    "context_lens": tensor([1, 17], "int32"),
}


@pytest.mark.parametrize("module", ["compiled", "reference"])
@pytest.mark.parametrize("argument", [*BAD_ATTENTION, "dtype", "too few tokens", "table too narrow", "negative window"])
def test_bad_arguments_name_the_argument(isa: str, module: str, argument: str) -> None:
    good = {
        "query": tensor(np.zeros((2, 4, 16))),
        "key_cache": tensor(np.zeros((4, 2, 8, 16))),
        "value_cache": tensor(np.zeros((4, 2, 8, 16))),
        "block_tables": tensor([[0, 1], [2, 3]], "int32"),
        "query_starts": tensor([0, 1, 2], "int32"),
        "context_lens": tensor([9, 9], "int32"),
        "scale": 1.0,
        "sliding_window": 0,
    }
    special = {
        "dtype": {"block_tables": tensor([[0, 1], [2, 3]], "int64")},
        "too few tokens": {"context_lens": tensor([9, 0], "int32")},
        "table too narrow": {"block_tables": tensor([[0], [2]], "int32")},
        "negative window": {"sliding_window": -1},
    }
    change = special.get(argument) or {argument: BAD_ATTENTION[argument]}
    named = "block_tables" if argument == "context_lens" else next(iter(change))
    function = ops.paged_attention if module == "compiled" else reference.paged_attention
    function(**good)
    with pytest.raises(ValueError, match=rf"^{named}: "):
        function(**{**good, **change})
