from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from paddle import Tensor

from fastengine import custom_ops as ops
from fastengine.custom_ops import reference
from tests.custom_ops.helpers import assert_identical, tensor


@dataclass
class Rows:
    """Sampling arguments as lists, one entry per row."""

    logits: np.ndarray
    temperature: list[float] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    top_p: list[float] = field(default_factory=list)
    min_p: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def args(self) -> list[Tensor]:
        dtypes = ("float32", "float32", "int32", "float32", "float32", "int64", "int32")
        return [tensor(getattr(self, f.name), dtype) for f, dtype in zip(fields(self), dtypes, strict=True)]

    def only(self, r: int) -> Rows:
        return Rows(**{f.name: getattr(self, f.name)[r : r + 1] for f in fields(self)})


def random_rows(rng: np.random.Generator, num_rows: int, vocab_size: int, scale: float) -> Rows:
    pick = lambda *choices: [choices[i] for i in rng.integers(0, len(choices), num_rows)]  # noqa: E731
    return Rows(
        rng.normal(size=(num_rows, vocab_size)) * scale,
        pick(0.0, 0.3, 0.7, 1.0, 1.5, 5.0),
        pick(0, 0, 1, 3, 40, vocab_size, 10**6),
        pick(1.0, 1.0, 0.95, 0.5, 0.01, 0.0),
        pick(0.0, 0.0, 0.02, 0.3, 1.0),
        [int(s) for s in rng.integers(-(2**63), 2**63 - 1, num_rows)],
        [int(p) for p in rng.integers(0, 10000, num_rows)],
    )


def assert_drawn_rightly(rows: Rows, token_ids: Tensor) -> None:
    """Each row's random number lies within its token's share of the running sum, up to rounding."""
    for r, token in enumerate(token_ids.numpy()):
        logits = np.asarray(rows.logits[r], dtype=np.float32)
        if rows.temperature[r] < 1e-5:
            assert token == logits.argmax()
            continue
        kept = reference.kept_weights(logits, rows.temperature[r], rows.top_k[r], rows.top_p[r], rows.min_p[r])
        mass = np.cumsum(kept) / kept.sum()
        u = reference.uniform(rows.seeds[r], rows.positions[r])
        # A filter's boundary may fall on the other side of one entry: allow its share.
        slack = 2e-5 + (kept[kept > 0].min() / kept.sum() if rows.top_p[r] < 1.0 else 0.0)
        assert mass[token] - kept[token] / kept.sum() - slack <= u <= mass[token] + slack


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1000, 1024, 5003, 49152])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0, 300.0])
def test_draws_match_the_reference(rng: np.random.Generator, vocab_size: int, scale: float) -> None:
    rows = random_rows(rng, 6 if vocab_size > 10000 else 40, vocab_size, scale)
    token_ids = ops.sample(*rows.args())
    assert_drawn_rightly(rows, token_ids)
    assert (token_ids.numpy() == reference.sample(*rows.args()).numpy()).mean() > 0.95


@pytest.mark.usefixtures("isa")
def test_frequencies_follow_the_probabilities(rng: np.random.Generator) -> None:
    n, logits = 4000, np.log([0.4, 0.3, 0.2, 0.07, 0.03])
    for top_k, top_p, expected in ((0, 1.0, [0.4, 0.3, 0.2, 0.07, 0.03]), (2, 1.0, [4 / 7, 3 / 7, 0, 0, 0]), (0, 0.85, [4 / 9, 3 / 9, 2 / 9, 0, 0])):
        rows = Rows(np.tile(logits, (n, 1)), [1.0] * n, [top_k] * n, [top_p] * n, [0.0] * n, [123] * n, list(range(n)))
        counts = np.bincount(ops.sample(*rows.args()).numpy(), minlength=5) / n
        np.testing.assert_allclose(counts, expected, atol=4 * np.sqrt(0.25 / n))
        assert not counts[np.asarray(expected) == 0].any()


def test_uniform_is_philox() -> None:
    # The published known answer of Philox4x32-10 for a counter and a key of zeros: 6627e8d5 e169c58d ...
    assert reference.uniform(0, 0) == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) * 2.0**-53


@pytest.mark.usefixtures("isa")
def test_ties_go_to_the_lowest_ids() -> None:
    n = 200
    logits = np.zeros((n, 500))
    logits[:, 100:110] = 3.0
    base = Rows(logits, [1.0] * n, [4] * n, [1.0] * n, [0.0] * n, list(range(n)), [0] * n)
    assert set(ops.sample(*base.args()).numpy().tolist()) == {100, 101, 102, 103}
    half = Rows(logits[:, 100:110], [1.0] * n, [0] * n, [0.45] * n, [0.0] * n, list(range(n)), [0] * n)
    assert set(ops.sample(*half.args()).numpy().tolist()) == {0, 1, 2, 3, 4}
    assert set(ops.argmax(tensor(logits)).numpy().tolist()) == {100}


@pytest.mark.usefixtures("isa")
def test_extreme_logits() -> None:
    inf, nan = np.inf, np.nan
    logits = np.full((6, 33), -inf)
    logits[0, 20] = -1e30
    logits[1, 5] = 3e38
    logits[1, 6] = -3e38
    logits[2, 7] = inf
    logits[3, :] = nan
    logits[3, 30] = 1.0
    logits[5, :] = -1e4
    logits[5, 32] = 1e4
    for temperature in (0.0, 1.0, 1e-4, 1e4):
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (3, 0.5, 0.5)):
            rows = Rows(logits, [temperature] * 6, [top_k] * 6, [top_p] * 6, [min_p] * 6, [7] * 6, [3] * 6)
            ids = ops.sample(*rows.args()).numpy()
            if temperature < 1e4 or (top_k, top_p, min_p) == (3, 0.5, 0.5):
                assert ids.tolist() == [20, 5, 7, 30, 0, 32]
            assert ids[0] == 20
            assert ids[2:5].tolist() == [7, 30, 0]


@pytest.mark.usefixtures("two_threads")
def test_row_alone_equals_row_in_a_batch(rng: np.random.Generator) -> None:
    rows = random_rows(rng, 64, 3000, 2.0)
    together = ops.sample(*rows.args())
    for r in range(0, 64, 5):
        assert_identical(ops.sample(*rows.only(r).args())[0], together[r])
    ops.set_num_threads(1)
    assert_identical(ops.sample(*rows.args()), together)
    assert_identical(ops.argmax(tensor(rows.logits)), reference.argmax(tensor(rows.logits)))


@pytest.mark.usefixtures("isa")
def test_no_rows() -> None:
    rows = Rows(np.zeros((0, 9)))
    assert ops.sample(*rows.args()).shape == [0]
    assert ops.argmax(tensor(rows.logits)).shape == [0]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("function", [ops.sample, reference.sample])
def test_bad_arguments_name_the_argument(rng: np.random.Generator, function: object) -> None:
    assert callable(function)
    good = random_rows(rng, 3, 10, 1.0).args()
    function(*good)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    for index, name in enumerate(names, start=1):
        for bad in (good[index][:2], good[index].astype("float64")):
            with pytest.raises(ValueError, match=rf"^{name}: "):
                function(*good[:index], bad, *good[index + 1 :])
    with pytest.raises(ValueError, match=r"^logits: "):
        function(good[0].astype("float64"), *good[1:])
