"""Sampling inside the fused step draws what the plain sampler draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from fastengine.custom_ops.fused import Layout
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence
from fastengine.protocol.tokens import pack_token_ids
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.fused_sampler import FusedSampler
from fastengine.worker.grammar import Masks
from fastengine.worker.sampler import Sampler
from fastengine.worker.sampling_table import SamplingTable
from tests.custom_ops.fused.tiny import TinyModel

VOCAB = 300
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 5},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.7, "top_p": 0.8},
    {"temperature": 0.9, "logit_bias": {3: 5.0, 11: -100.0}, "logprobs": 4},
    {"temperature": 1.0, "min_tokens": 50, "stop_token_ids": [5, 6], "top_k": 40},
    {"temperature": 0.0, "bad_words_token_ids": ((7,), (8, 9))},
]


class EvenTokens:
    """Grammars under which a slot may only have even tokens; slot 9 can't go on, and after token 0 nobody can."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def masks(self, slots: list[int]) -> Masks:
        allowed = np.zeros((len(slots), VOCAB), bool)
        allowed[:, ::2] = True
        return Masks(allowed, {row: "no token fits" for row, slot in enumerate(slots) if slot == 9})

    def advance(self, slot: int, token_id: int) -> str | None:
        self.taken.append((slot, token_id))
        return "zero" if token_id == 0 else None


@pytest.fixture(scope="module")
def model() -> Iterator[TinyModel]:
    model = TinyModel(Layout.FLOAT32, "best")
    yield model
    model.fused.close()


def filled(grammars: EvenTokens) -> tuple[SamplingTable, PersistentBatch]:
    rng = np.random.default_rng(3)
    batch = PersistentBatch(max_num_seqs=len(WAYS) + 2, max_model_len=64, block_size=16, vocab_size=VOCAB)
    table = SamplingTable(batch.max_num_seqs, VOCAB, (2,), grammars)  # type: ignore[arg-type]
    for slot, way in enumerate(WAYS):
        tokens = rng.integers(0, 40, 30 + slot).tolist()
        sequence = StartedSequence(
            slot=slot,
            token_ids=pack_token_ids(tokens),
            num_prompt=11 + slot,
            num_computed=0,
            block_ids=pack_token_ids([]),
            sampling=SamplingParams(**way),
            seed=1000 + slot,
            request_id=str(slot),
        )
        assert batch.start(sequence) is None
        assert table.start(sequence) is None
    return table, batch


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("constrained", [[], [0, 3, 7, 8, 9]])
def test_tokens_and_logprobs_are_the_plain_samplers(model: TinyModel, mode: Any, constrained: list[int]) -> None:
    plain_grammars, fused_grammars = EvenTokens(), EvenTokens()
    table, batch = filled(plain_grammars)
    table.constrained[constrained] = table.adjusted[constrained] = True
    plain, fused = Sampler(table, batch, mode), FusedSampler(table, batch, processed_logprobs=mode == "processed")
    rng = np.random.default_rng(4)
    for spread in (0.2, 1.0, 4.0):
        slots = rng.permutation(len(WAYS)).astype(np.int32)
        logits = (rng.standard_normal((slots.size, VOCAB)) * spread).astype(np.float32)
        table.grammars = plain_grammars  # type: ignore[assignment]
        tensor = paddle.to_tensor(logits)
        drawn = plain.sample(tensor, slots)
        want = plain.logprobs(tensor, slots, drawn)
        table.grammars = fused_grammars  # type: ignore[assignment]
        prepared, token_ids = fused.prepare(slots), np.empty(slots.size, np.int32)
        model.fused.sample(logits.copy(), prepared.rows, token_ids)
        got = fused.finish(prepared, token_ids)
        np.testing.assert_array_equal(token_ids, drawn.token_ids)
        assert prepared.errors == drawn.errors
        assert [entry.slot for entry in got] == [entry.slot for entry in want]
        for ours, theirs in zip(got, want, strict=True):
            assert ours.tokens[0].rank == theirs.tokens[0].rank
            assert ours.tokens[0].logprob == pytest.approx(theirs.tokens[0].logprob, abs=1e-6)
            np.testing.assert_array_equal(ours.tokens[0].top_ids, theirs.tokens[0].top_ids)
            np.testing.assert_allclose(ours.tokens[0].top_logprobs, theirs.tokens[0].top_logprobs, atol=1e-6)
    assert fused_grammars.taken == plain_grammars.taken


def test_a_rule_that_cannot_be_followed_fails_its_row_alone(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    table, batch = filled(EvenTokens())
    fused = FusedSampler(table, batch, processed_logprobs=False)
    slots = np.arange(len(WAYS), dtype=np.int32)
    logits = np.random.default_rng(5).standard_normal((slots.size, VOCAB)).astype(np.float32)
    whole, broken = np.empty(slots.size, np.int32), np.empty(slots.size, np.int32)
    model.fused.sample(logits.copy(), fused.prepare(slots).rows, whole)
    monkeypatch.setattr(table.rules[9], "bad_words", (((1, "x"), "y"),))
    prepared = fused.prepare(slots)
    model.fused.sample(logits.copy(), prepared.rows, broken)
    fused.finish(prepared, broken)
    assert list(prepared.errors) == [9]
    assert "can't be followed" in prepared.errors[9].message
    np.testing.assert_array_equal(broken[:9], whole[:9])
