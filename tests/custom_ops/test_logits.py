from __future__ import annotations

import numpy as np
import pytest
from paddle import Tensor

from fastengine import custom_ops as ops
from fastengine.custom_ops import reference
from tests.custom_ops.helpers import assert_close, assert_identical, tensor


def penalties(rng: np.random.Generator, num_rows: int, vocab_size: int) -> dict[str, Tensor]:
    lengths, biases = rng.integers(0, 60, num_rows), rng.integers(0, 5, num_rows)
    starts, bias_starts = np.concatenate([[0], np.cumsum(lengths)]), np.concatenate([[0], np.cumsum(biases)])
    bias_values = rng.normal(size=bias_starts[-1]) * 10
    bias_values[::3] = -np.inf
    return {
        "repetition": tensor(rng.choice([1.0, 1.3, 0.8], num_rows)),
        "presence": tensor(rng.choice([0.0, 0.5, -1.0], num_rows)),
        "frequency": tensor(rng.choice([0.0, 0.25], num_rows)),
        "token_ids": tensor(rng.integers(-1, vocab_size + 1, starts[-1]), "int32"),
        "row_starts": tensor(starts, "int32"),
        "output_starts": tensor(starts[:-1] + rng.integers(0, lengths + 1), "int32"),
        "bias_ids": tensor(rng.integers(0, vocab_size, bias_starts[-1]), "int32"),
        "bias_values": tensor(bias_values),
        "bias_starts": tensor(bias_starts, "int32"),
    }


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("vocab_size", [1, 30, 5000])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_penalties_match_the_reference(rng: np.random.Generator, vocab_size: int, num_rows: int) -> None:
    start, args = rng.normal(size=(num_rows, vocab_size)), penalties(rng, num_rows, vocab_size)
    actual, expected = tensor(start), tensor(start)
    ops.apply_penalties(actual, **args)
    reference.apply_penalties(expected, **args)
    finite = np.isfinite(expected.numpy())
    np.testing.assert_array_equal(np.isfinite(actual.numpy()), finite)
    np.testing.assert_allclose(actual.numpy()[finite], expected.numpy()[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("isa")
def test_each_penalty_by_hand() -> None:
    logits = tensor([[2.0, -2.0, 1.0, 0.5, 4.0]])
    ops.apply_penalties(
        logits,
        repetition=tensor([2.0]),
        presence=tensor([0.5]),
        frequency=tensor([0.25]),
        token_ids=tensor([0, 0, 1, 2, 2], "int32"),
        row_starts=tensor([0, 5], "int32"),
        output_starts=tensor([2], "int32"),
        bias_ids=tensor([3, 4], "int32"),
        bias_values=tensor([1.5, -np.inf]),
        bias_starts=tensor([0, 2], "int32"),
    )
    assert logits.numpy().tolist() == [[1.0, -4.75, -0.5, 2.0, -np.inf]]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("function", [ops.apply_penalties, reference.apply_penalties])
@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("repetition", tensor([1.0])),
        ("repetition", tensor([1.0, 0.0])),
        ("row_starts", tensor([0, 3, 2], "int32")),
        ("row_starts", tensor([1, 2, 2], "int32")),
        ("row_starts", tensor([0, 1, 4], "int32")),
        ("output_starts", tensor([0, 0], "int32")),
        ("bias_values", tensor([1.0, 2.0])),
        ("bias_starts", tensor([0, 0, 2], "int32")),
    ],
)
def test_bad_penalties_name_the_argument(function: object, argument: str, bad: Tensor) -> None:
    assert callable(function)
    good = {
        "repetition": tensor([1.0, 1.0]),
        "presence": tensor([0.0, 0.0]),
        "frequency": tensor([0.0, 0.0]),
        "token_ids": tensor([1, 2], "int32"),
        "row_starts": tensor([0, 1, 2], "int32"),
        "output_starts": tensor([1, 1], "int32"),
        "bias_ids": tensor([1], "int32"),
        "bias_values": tensor([1.0]),
        "bias_starts": tensor([0, 1, 1], "int32"),
    }
    function(tensor(np.zeros((2, 8))), **good)
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        function(tensor(np.zeros((2, 8))), **{**good, argument: bad})


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("vocab_size", [20, 1000, 5003])
def test_logprobs_match_the_reference(rng: np.random.Generator, k: int, scale: float, vocab_size: int) -> None:
    logits = tensor(rng.normal(size=(9, vocab_size)) * scale)
    token_ids = tensor(rng.integers(0, vocab_size, 9), "int32")
    actual, expected = ops.log_softmax_gather(logits, token_ids, k), reference.log_softmax_gather(logits, token_ids, k)
    assert_close(actual[0], expected[0])
    assert_identical(actual[1], expected[1])
    assert_identical(actual[2], expected[2])
    assert_close(actual[3], expected[3])


@pytest.mark.usefixtures("isa")
def test_banned_tokens_have_no_probability() -> None:
    logits = np.full((2, 20), -np.inf)
    logits[0, 3] = 5.0
    for module in (ops, reference):
        logprobs, ranks, top_ids, top_logprobs = module.log_softmax_gather(tensor(logits), tensor([3, 4], "int32"), 2)
        assert logprobs.numpy().tolist() == [0.0, -np.inf]
        assert ranks.numpy().tolist() == [1, 1]
        assert top_ids.numpy().tolist() == [[3, 0], [0, 1]]
        assert top_logprobs.numpy().tolist() == [[0.0, -np.inf], [-np.inf, -np.inf]]


@pytest.mark.usefixtures("two_threads")
def test_row_alone_equals_row_in_a_batch(rng: np.random.Generator) -> None:
    logits, token_ids = tensor(rng.normal(size=(40, 3000))), tensor(rng.integers(0, 3000, 40), "int32")
    together = ops.log_softmax_gather(logits, token_ids, 4)
    alone = ops.log_softmax_gather(logits[7:8], token_ids[7:8], 4)
    for one, all_rows in zip(alone, together, strict=True):
        assert_identical(one[0], all_rows[7])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("function", [ops.log_softmax_gather, reference.log_softmax_gather])
def test_bad_arguments_name_the_argument(function: object) -> None:
    assert callable(function)
    logits, ids = tensor(np.zeros((2, 8))), tensor([0, 7], "int32")
    for args, name in (((logits, ids, 9), "k"), ((logits, ids, -1), "k"), ((logits, ids[:1], 2), "token_ids"), ((logits, ids + 1, 2), "token_ids")):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            function(*args)
