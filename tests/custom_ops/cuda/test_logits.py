"""Sampling, penalties, bitmasks and log-probabilities against the reference operators."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops import reference
from tests.custom_ops.cuda.memory import Buffer, Kernels, copied, filled, poisoned
from tests.custom_ops.helpers import tensor

VOCAB = 1500


def rows_of_logits(rng: np.random.Generator, rows: int, vocab: int = VOCAB) -> np.ndarray:
    return (rng.normal(size=(rows, vocab)) * 4).astype(np.float32)


def run_sample(cuda: Kernels, logits: np.ndarray, **settings: np.ndarray) -> np.ndarray:
    rows, vocab = logits.shape
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0} | settings
    dtypes = {"top_k": "int32", "seeds": "int64", "positions": "int32"}
    buffers = {name: filled(np.broadcast_to(value, (rows,)), dtypes.get(name, "float32")) for name, value in columns.items()}
    out = poisoned((rows,), "int32")
    cuda.call("sample", logits=filled(logits), **buffers, token_ids=out, num_rows=rows, vocab_size=vocab)
    return out.stored


def reference_sample(logits: np.ndarray, **settings: np.ndarray) -> np.ndarray:
    rows = len(logits)
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0} | settings
    dtypes = {"top_k": "int32", "seeds": "int64", "positions": "int32"}
    tensors = [tensor(np.broadcast_to(value, (rows,)), dtypes.get(name, "float32")) for name, value in columns.items()]
    return reference.sample(tensor(logits), *tensors).numpy()


def test_argmax_takes_the_first_of_equals_and_skips_nan(cuda: Kernels, rng: np.random.Generator) -> None:
    logits = rows_of_logits(rng, 6)
    logits[1, [40, 7, 1499]] = 100.0
    logits[2, :] = np.nan
    logits[3, :] = -np.inf
    logits[4, 3] = np.nan
    logits[5, :] = -np.inf
    logits[5, :2] = np.nan
    out = poisoned((6,), "int32")
    cuda.call("argmax", logits=filled(logits), token_ids=out, num_rows=6, vocab_size=VOCAB)
    np.testing.assert_array_equal(out.stored[:5], reference.argmax(tensor(logits[:5])).numpy())
    assert np.isnan(logits[5, out.stored[5]]) or logits[5, out.stored[5]] == -np.inf


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_k": 700},
        {"top_p": 0.9},
        {"top_p": 0.9999, "temperature": 3.0},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"min_p": 7.0},
        {"top_k": 60, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
        {"top_k": VOCAB + 5, "temperature": 1e-6},
    ],
    ids=str,
)
def test_samples_what_the_reference_does(cuda: Kernels, rng: np.random.Generator, settings: dict[str, float]) -> None:
    """The same token for the same seed and position."""
    logits = rows_of_logits(rng, 24)
    varied = {name: np.full(24, value) for name, value in settings.items()}
    varied |= {"seeds": rng.integers(-(2**62), 2**62, 24), "positions": rng.integers(0, 5000, 24)}
    np.testing.assert_array_equal(run_sample(cuda, logits, **varied), reference_sample(logits, **varied))


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.004}, {"top_p": 0.5}, {"top_k": 900, "top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_filters_keep_the_lower_ids_of_equal_logits(cuda: Kernels, settings: dict[str, float]) -> None:
    """Rows of equal values, of two values, and with -inf: every draw is one of the kept, and the last kept can be drawn."""
    logits = np.zeros((3, 1100), dtype=np.float32)
    logits[1, ::2] = -1.0
    logits[2, 5:] = -np.inf
    for r in range(3):
        top_k, top_p, min_p = (settings.get(name, default) for name, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
        kept = np.flatnonzero(reference.kept_weights(logits[r], 1.0, int(top_k), float(np.float32(top_p)), min_p))
        draws = 12
        varied = {name: np.full(draws, value) for name, value in settings.items()} | {"seeds": np.arange(draws)}
        drawn = run_sample(cuda, np.repeat(logits[r : r + 1], draws, axis=0), **varied)
        assert np.isin(drawn, kept).all()
        expected = reference_sample(np.repeat(logits[r : r + 1], draws, axis=0), **varied)
        np.testing.assert_array_equal(drawn, expected)


def test_a_large_vocabulary(cuda: Kernels, rng: np.random.Generator) -> None:
    logits = rows_of_logits(rng, 2, 70_001)
    settings = {"top_p": np.array([0.95, 0.3]), "top_k": np.array([0, 40]), "seeds": np.array([3, 4])}
    np.testing.assert_array_equal(run_sample(cuda, logits, **settings), reference_sample(logits, **settings))


def test_rows_without_a_finite_maximum_are_greedy(cuda: Kernels) -> None:
    logits = np.full((3, 20), -np.inf, dtype=np.float32)
    logits[1, 4] = np.inf
    logits[2, 1:] = np.nan
    assert run_sample(cuda, logits, top_p=np.full(3, 0.5)).tolist() == [0, 4, 0]


def test_penalties_and_biases(cuda: Kernels, rng: np.random.Generator) -> None:
    vocab = 9000  # more than one slice
    logits = rows_of_logits(rng, 4, vocab)
    known = [rng.integers(-3, vocab + 3, n) for n in (0, 50, 700, 9)]
    known[2][::3] = 8191
    starts = np.cumsum([0, *map(len, known)])
    outputs = starts[:-1] + np.array([0, 20, 100, 9])
    bias_ids, bias_starts = np.array([5, 8999, 5, -1, vocab, 100]), np.array([0, 3, 3, 6, 6])
    arguments = {
        "repetition": np.array([1.3, 1.7, 0.8, 1.0]),
        "presence": np.array([0.5, -0.2, 1.0, 0.0]),
        "frequency": np.array([0.1, 0.3, -0.5, 0.0]),
        "token_ids": np.concatenate(known),
        "row_starts": starts,
        "output_starts": outputs,
        "bias_ids": bias_ids,
        "bias_values": np.array([1.5, -np.inf, 0.25, 1.0, 1.0, -2.0]),
        "bias_starts": bias_starts,
    }
    kind = {name: "int32" if name.endswith(("ids", "starts")) else "float32" for name in arguments}
    given = filled(logits)
    cuda.call("apply_penalties", logits=given, **{n: filled(v, kind[n]) for n, v in arguments.items()}, num_rows=4, vocab_size=vocab)
    expected = tensor(logits)
    reference.apply_penalties(expected, *(tensor(v, kind[n]) for n, v in arguments.items()))
    np.testing.assert_allclose(given.stored, expected.numpy(), rtol=2e-6, atol=2e-6)


def test_bitmask(cuda: Kernels, rng: np.random.Generator) -> None:
    vocab, rows = 70, np.array([3, 1])
    allowed = rng.random((2, 96)) < 0.5
    logits = filled(rows_of_logits(rng, 4, vocab))
    before = copied(logits)
    mask = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    cuda.call("apply_bitmask", logits=logits, mask=filled(mask, "int32"), rows=filled(rows, "int32"), num_masks=2, vocab_size=vocab)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(logits.stored[row], np.where(allowed[i, :vocab], before.stored[row], -np.inf))
    np.testing.assert_array_equal(logits.stored[[0, 2]], before.stored[[0, 2]])


def run_logprobs(cuda: Kernels, logits: np.ndarray, ids: np.ndarray, k: int) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    rows, vocab = logits.shape
    out = (poisoned((rows,)), poisoned((rows,), "int32"), poisoned((rows, k), "int32"), poisoned((rows, k)))
    names = dict(zip(("logprobs", "ranks", "top_ids", "top_logprobs"), out, strict=True))
    cuda.call("log_softmax_gather", logits=filled(logits), token_ids=filled(ids, "int32"), **names, num_rows=rows, vocab_size=vocab, k=k)
    return out


@pytest.mark.parametrize("k", [0, 1, 20, 600])
def test_log_probabilities(cuda: Kernels, rng: np.random.Generator, k: int) -> None:
    logits = rows_of_logits(rng, 5)
    logits[0, 30:60] = 15.0  # equals
    logits[1, 10] = np.nan
    logits[2, 20:] = -np.inf
    logits[3, :] = -np.inf
    ids = np.array([45, 10, 1200, 7, 3])
    logprobs, ranks, top_ids, top_logprobs = run_logprobs(cuda, logits, ids, k)
    expected = [x.numpy() for x in reference.log_softmax_gather(tensor(logits), tensor(ids, "int32"), k)]
    np.testing.assert_allclose(logprobs.stored, expected[0], rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(ranks.stored, expected[1])
    np.testing.assert_array_equal(top_ids.stored, expected[2])
    np.testing.assert_allclose(top_logprobs.stored, expected[3], rtol=1e-6, atol=1e-5)


def test_all_of_a_small_vocabulary(cuda: Kernels, rng: np.random.Generator) -> None:
    logits = rows_of_logits(rng, 2, 37)
    _, _, top_ids, _ = run_logprobs(cuda, logits, np.array([0, 36]), 37)
    np.testing.assert_array_equal(top_ids.stored, np.argsort(-logits, axis=1, kind="stable"))
