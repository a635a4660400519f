"""Steps of decodes alone, which the fused operator takes from the persistent batch itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids
from fastengine.worker.fused_executor import FusedExecutor
from fastengine.worker.model_host import ModelHost

from .conftest import driver_of, loaded_host
from .driver import Request
from .models import NUM_BLOCKS
from .test_fused import FLAGS, model_at, prompts


@pytest.fixture
def host(tmp_path: Path) -> ModelHost:
    path, _ = model_at(tmp_path / "model")
    return loaded_host(path, quantization="wint8", **FLAGS)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step without chunks, whether the operator could do it alone."""
    found = []
    original = FusedExecutor.decode

    def decode(self: FusedExecutor, slots: bytes) -> bytes | None:
        token_ids = original(self, slots)
        found.append(token_ids is not None)
        return token_ids

    monkeypatch.setattr(FusedExecutor, "decode", decode)
    return found


def outputs(host: ModelHost, requests: list[Request]) -> list[list[int]]:
    host.init_cache(NUM_BLOCKS, 0)
    return [request.output for request in driver_of(host).run(requests)]


def test_the_tokens_are_those_of_the_long_way(host: ModelHost, decoded: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = outputs(host, prompts())
    assert decoded
    assert all(decoded)
    monkeypatch.setattr(FusedExecutor, "decode", lambda self, slots: None)
    assert outputs(host, prompts()) == found


def test_one_row_that_is_not_plain_takes_the_step_the_long_way(host: ModelHost, decoded: list[bool]) -> None:
    alone = outputs(host, [Request([1, 2, 3], 6)])
    assert all(decoded)
    decoded.clear()
    others = [SamplingParams(temperature=0.0, logprobs=1), SamplingParams(temperature=0.0, repetition_penalty=1.5)]
    for sampling in others:
        assert outputs(host, [Request([1, 2, 3], 6), Request([4, 5], 6, sampling)])[:1] == alone
    assert decoded
    assert not any(decoded)


def start(slot: int, token_ids: list[int], blocks: list[int]) -> StepPlan:
    sampling = SamplingParams(temperature=0.0)
    ids = pack_token_ids(token_ids)
    sequence = StartedSequence(
        slot=slot, token_ids=ids, num_prompt=len(token_ids), num_computed=0, block_ids=pack_token_ids(blocks), sampling=sampling
    )
    return StepPlan(
        step_id=0,
        started=[sequence],
        chunk_slots=pack_token_ids([slot]),
        chunk_starts=pack_token_ids([0]),
        chunk_lengths=pack_token_ids([len(token_ids)]),
    )


@pytest.mark.parametrize("fault", ["no block", "foreign block", "foreign token", "never started"])
def test_what_would_reach_foreign_memory_is_told_apart(host: ModelHost, decoded: list[bool], fault: str) -> None:
    assert host.batch is not None
    host.step(start(0, list(range(1, 16)), [3]))
    host.step(start(1, [1, 2], [4]))
    if fault == "foreign block":
        host.batch.block_table[0, 0] = NUM_BLOCKS + 5
    if fault == "foreign token":
        host.batch.tokens[0, 15] = host.spec.vocab_size
    slot = 2 if fault == "never started" else 0
    plan = StepPlan(step_id=1, decodes=pack_token_ids([slot, 1]))
    if fault.startswith("foreign"):
        with pytest.raises(ValueError, match="outside of"):
            host.step(plan)
    elif fault == "no block":
        assert host.step(plan).errors == []  # the sixteenth position still fits
        result = host.step(StepPlan(step_id=2, decodes=pack_token_ids([slot, 1])))
        assert [error.slot for error in result.errors] == [0]
        assert unpack_token_ids(result.slots).tolist() == [1]
    else:
        result = host.step(plan)
        assert [error.slot for error in result.errors] == [2]
        assert unpack_token_ids(result.slots).tolist() == [1]
    assert decoded[-1] is False


def test_states_that_are_no_numbers_fail_their_row_alone(host: ModelHost, decoded: list[bool]) -> None:
    assert host.cache is not None
    host.step(start(0, [1, 2, 3], [3]))
    host.step(start(1, [4, 5, 6], [4]))
    for layer in host.cache.layers:
        for scale in layer.scales:
            scale.write((slice(3, 4),), np.float32(np.nan) * np.ones((1, *scale.shape[1:]), np.float32))
    result = host.step(StepPlan(step_id=1, decodes=pack_token_ids([0, 1])))
    assert [error.slot for error in result.errors] == [0]
    assert unpack_token_ids(result.slots).tolist() == [1]
    assert decoded == [False]
    host.step(StepPlan(step_id=2, released=pack_token_ids([0]), decodes=pack_token_ids([1])))
    assert decoded[-1] is True
