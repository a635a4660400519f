"""The LM head's screen: tokens of few greedy rows are those of the whole head, whatever weights and states are."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from fastengine.custom_ops.fused import FusedModel, FusedShape, KvType, Layout, Packing, Source, SourceKind, _check, _StepArgs, load_library
from fastengine.custom_ops.library import LIBRARY_PATH
from tests.conftest import load_golden

from .test_default_model import BLOCK_SIZE, load
from .tiny import Row, TinyCache, cos_sin, new_arena, step

VOCAB = 1991  # a panel is left unfinished


def head_of(weights: np.ndarray, isa: str, *, screen: bool = True) -> FusedModel:
    """A model of which only the LM head, ``weights`` float32 ``[vocab, hidden]`` rounded to Q8_0, is of interest."""
    vocab, hidden = weights.shape
    shape = FusedShape(1, hidden, 1, 1, 32, 32, vocab, 1e-5, cos_sin(32, 16), tied=True)
    model = FusedModel(load_library(LIBRARY_PATH), shape, Packing(Layout.INT4, screen), 2, isa=isa)
    model.bind(new_arena(model))
    model.set_rows("embedding", Source(weights.astype(np.float32), SourceKind.FLOAT32, vocab))
    return model


def tokens_of(model: FusedModel, states: np.ndarray, batch: int) -> np.ndarray:
    """Greedy tokens of ``states`` float32 ``[n, hidden]``, ``batch`` rows a step."""
    tokens = np.empty(len(states), np.int32)
    for at in range(0, len(states), batch):
        rows, out = np.ascontiguousarray(states[at : at + batch], np.float32), tokens[at : at + batch]
        args = _StepArgs(num_samples=len(rows), token_out=out.ctypes.data, hidden_in=rows.ctypes.data)
        _check(model._library, model._library.fe_fused_step(model._handle, ctypes.byref(args), model.num_threads))
    return tokens


def logits_of(model: FusedModel, states: np.ndarray) -> np.ndarray:
    out = np.empty((len(states), model.shape.vocab), np.float32)
    model.logits(np.ascontiguousarray(states, np.float32), out)
    return out


def check(model: FusedModel, states: np.ndarray, batches: tuple[int, ...] = (1, 2, 3, 5, 8, 13, 16)) -> None:
    want = logits_of(model, states).argmax(-1)
    for batch in batches:
        for model.num_threads in (1, 2):
            np.testing.assert_array_equal(tokens_of(model, states, batch), want, f"{batch} rows, {model.num_threads} threads")
    model.close()


def states_with_outliers(rng: np.random.Generator, count: int, hidden: int) -> np.ndarray:
    """As a model's are: one or two features stand out, by up to 60 times the others."""
    states = rng.standard_normal((count, hidden)).astype(np.float32)
    states[:, 7] += 60
    states[::2, 40] -= 20
    states *= rng.uniform(0.01, 30, (count, 1)).astype(np.float32)
    return states


@pytest.mark.parametrize("hidden", [96, 576])
def test_tokens_are_those_of_the_whole_head(isa: str, hidden: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((VOCAB, hidden)) * rng.uniform(0.1, 1, (VOCAB, 1))
    check(head_of(weights, isa), np.concatenate([states_with_outliers(rng, 1000, hidden), rng.standard_normal((1000, hidden))]))


def test_states_near_a_column_as_those_of_texts_are(isa: str) -> None:
    """A clear winner, and few strips to look at."""
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((VOCAB, 576))
    check(head_of(weights, isa), weights[rng.integers(0, VOCAB, 2000)] + rng.standard_normal((2000, 576)))


def test_of_equal_columns_the_lowest_id_wins(isa: str) -> None:
    rng = np.random.default_rng(3)
    distinct = rng.standard_normal((30, 96))
    weights = distinct[rng.permutation(np.arange(VOCAB) % 30)]
    check(head_of(weights, isa), rng.standard_normal((300, 96)))


@pytest.mark.parametrize("kind", ["one value", "one value a column", "zeros", "two values"])
def test_weights_that_four_bits_hold_exactly_or_that_are_all_alike(isa: str, kind: str) -> None:
    """Nothing is left of the screen's error but what float operations round."""
    rng = np.random.default_rng(4)
    values = {
        "one value": np.full((VOCAB, 1), 0.3),
        "one value a column": rng.uniform(-1, 1, (VOCAB, 1)),
        "zeros": np.zeros((VOCAB, 1)),
        "two values": np.sign(rng.standard_normal((VOCAB, 96))) * 0.7,
    }[kind]
    weights = np.broadcast_to(values, (VOCAB, 96))
    check(head_of(weights, isa), np.concatenate([states_with_outliers(rng, 100, 96), np.abs(rng.standard_normal((100, 96))), np.zeros((9, 96))]))


def test_logits_that_lie_closely_together(isa: str) -> None:
    """Columns that differ by less than the screen's error, so that nearly all may win."""
    rng = np.random.default_rng(5)
    weights = rng.standard_normal(576) + 1e-2 * rng.standard_normal((VOCAB, 576))
    check(head_of(weights, isa), rng.standard_normal((200, 576)))


@pytest.mark.parametrize("low", [0, 15])
def test_states_along_what_four_bits_leave_of_the_weights(isa: str, low: int) -> None:
    """Weights whose low halves are all the same, and states that add up exactly what plain rounding would lose."""
    rng = np.random.default_rng(6)
    high = rng.integers(1, 15, (VOCAB, 576))
    weights = (high * 16 + low - 128).astype(np.float64)
    weights[:, ::32] = 127  # Q8_0's scale is 1
    residuals = weights - four_bit(weights)
    states = np.concatenate([np.abs(rng.standard_normal((200, 576))), np.sign(residuals[:200]), residuals[200:400], -residuals[400:600]])
    check(head_of(weights / 100, isa), states)


def test_states_along_the_residuals_of_random_weights(isa: str) -> None:
    """Of each state's column plain rounding loses the most it can: some thirty standard deviations."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((VOCAB, 576))
    residuals = weights - four_bit(weights)
    signs = np.sign(residuals[:1000])
    lost = np.einsum("nk,nk->n", residuals[:1000], signs) / np.sqrt(np.einsum("nk,nk->n", residuals[:1000] ** 2, signs**2))
    assert lost.min() > 15
    check(head_of(weights, isa), signs * rng.uniform(0.9, 1.1, signs.shape))


def four_bit(weights: np.ndarray) -> np.ndarray:
    """``weights`` rounded to the nearest of 16 values a block of 32."""
    blocks = weights.reshape(len(weights), -1, 32)
    low, step = blocks.min(-1, keepdims=True), np.ptp(blocks, axis=-1, keepdims=True) / 15
    return (np.rint((blocks - low) / step) * step + low).reshape(weights.shape)


def test_values_that_are_no_numbers(isa: str) -> None:
    """NaNs never win, and of a row without a number there is no token. States with a NaN fail their row by themselves."""
    rng = np.random.default_rng(8)
    weights = rng.standard_normal((VOCAB, 96)).astype(np.float32)
    weights[77, 5], weights[500, 50], weights[900] = np.nan, np.inf, 1e8
    model = head_of(weights, isa)
    states = np.concatenate([rng.standard_normal((50, 96)), states_with_outliers(rng, 50, 96)]).astype(np.float32)
    states[1::5, 60] = np.inf
    states[2::5] *= 1e33
    states[3::10] *= 1e-36
    found: set[int] = set()
    for batch in (1, 4, 8):
        logits = np.concatenate([logits_of(model, states[at : at + batch]) for at in range(0, len(states), batch)])
        ranked = np.where(np.isnan(logits), -np.inf, logits)
        want = np.where((ranked > -3.4e38).any(-1), ranked.argmax(-1), -1)
        np.testing.assert_array_equal(tokens_of(model, states, batch), want)
        found |= set(want.tolist())
    assert -1 in found
    assert len(found) > 20
    model.close()


def test_a_step_reads_the_screen_for_few_rows_only(isa: str) -> None:
    """A screen that says nothing of the winner's panel hides it from few rows, and from those alone."""
    weights = np.random.default_rng(9).uniform(0.5, 1, (VOCAB, 96))
    weights[130] = 2
    model, whole = head_of(weights, isa), head_of(weights, isa, screen=False)
    num_panels = -(-VOCAB // 32)
    panel_bytes = (model.num_bytes - whole.num_bytes) // num_panels
    states = np.ones((32, 96), np.float32)
    assert set(tokens_of(model, states, 1)) == {130}
    assert model._arena is not None
    screen = model._arena[-num_panels * panel_bytes :].reshape(num_panels, panel_bytes)
    screen[130 // 32] = 0
    assert 130 not in tokens_of(model, states, 1)
    assert set(tokens_of(model, states, 32)) == {130}
    assert set(tokens_of(whole, states, 1)) == {130}
    model.close()
    whole.close()


def test_new_weights_come_with_a_new_screen(isa: str) -> None:
    rng = np.random.default_rng(10)
    model = head_of(rng.standard_normal((VOCAB, 96)), isa)
    model.set_rows("embedding", Source(rng.standard_normal((700, 96)).astype(np.float32), SourceKind.FLOAT32, 700), first_row=333)
    check(model, rng.standard_normal((200, 96)), (1, 4))


def test_no_weight_is_off_by_more_than_half_a_step(isa: str) -> None:
    """Errors are uniform too, and those of neighbouring weights do not go together."""
    rng = np.random.default_rng(11)
    model = head_of(np.concatenate([rng.standard_normal((300, 576)), rng.uniform(-1, 3, (100, 576)), rng.standard_normal((100, 576)) ** 3]), isa)
    exact = np.stack([model.unpacked_row("embedding", row, 576) for row in range(500)]).astype(np.float64)
    stored = np.stack([model.unpacked_row("screen", row, 576) for row in range(500)]).reshape(500, 18, 32)
    steps = np.stack([np.diff(np.unique(block)).min() for row in stored for block in row]).reshape(500, 18, 1)
    errors = exact.reshape(stored.shape) - (stored - dithers(576).reshape(18, 32) * steps)
    relative = (errors / steps).reshape(500, 576)
    assert np.abs(relative).max() < 0.5 + 1e-3
    assert abs(relative.mean()) < 0.01
    assert abs(relative.var() - 1 / 12) < 0.002
    assert abs((relative[:, 1:] * relative[:, :-1]).mean()) < 0.005
    model.close()


def dithers(k: int) -> np.ndarray:
    """The operator's own (layouts.h)."""
    with np.errstate(over="ignore"):
        x = (np.arange(k, dtype=np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B9)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return ((x ^ x >> np.uint32(16)) >> np.uint32(8)) / 2.0**24 - 0.5


@pytest.mark.model
def test_the_default_models_answers_are_the_same(default_model: Path) -> None:
    """Every hidden state of the recorded answers and their prompts, few and many at a time."""
    model = load(default_model, Layout.INT4, "best")
    states = []
    for case in load_golden("smollm2_q4_1.json"):
        tokens = np.array(case["prompt_ids"] + case["greedy_ids"])
        hidden = np.empty((len(tokens), model.shape.hidden), np.float32)
        step(
            model, TinyCache(KvType.INT8, model.shape, num_blocks=12, block_size=BLOCK_SIZE), [Row(tokens, 0, list(range(1, 11)))], hidden_out=hidden
        )
        states.append(hidden)
    check(model, np.concatenate(states), (1, 4, 8))


def test_a_step_reads_the_screen_or_the_head() -> None:
    def model(tied: bool, screen: bool) -> FusedModel:
        return FusedModel(
            load_library(LIBRARY_PATH), FusedShape(1, 96, 1, 1, 32, 32, VOCAB, 1e-5, cos_sin(32, 16), tied=tied), Packing(Layout.INT4, screen), 1
        )

    plain, untied, screened = model(True, False), model(False, False), model(True, True)
    head = untied.num_bytes - plain.num_bytes
    most = 16 if screened.instruction_set == "avx2" else 2
    assert [screened.bytes_read(rows) for rows in (1, most, most + 1, 32)] == [screened.num_bytes - head] * 2 + [plain.num_bytes] * 2
    assert plain.bytes_read(1) == plain.num_bytes
    assert untied.bytes_read(1) == untied.num_bytes - head, "of the embedding a step reads its tokens' rows"
    for each in (plain, untied, screened):
        each.close()
