"""Steps of decodes alone, which the fused operator takes from the persistent batch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan, StepResult
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids
from fastengine.sampling_rules import is_plain
from fastengine.worker.fused_executor import FusedExecutor
from fastengine.worker.model_host import ModelHost
from fastengine.worker.run_cut import RunCut, no_cut

from .conftest import driver_of, loaded_host
from .driver import GREEDY, Request
from .models import NUM_BLOCKS
from .test_fused import FLAGS, model_at, prompts


@pytest.fixture
def host(tmp_path: Path) -> ModelHost:
    path, _ = model_at(tmp_path / "model")
    return loaded_host(path, quantization="wint8", **FLAGS)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step without chunks, whether the operator could do it alone."""
    found: list[bool] = []
    original = FusedExecutor.decode

    def decode(self: FusedExecutor, slots: bytes, num_steps: int, step_id: int, cut: RunCut) -> tuple[int, bytes]:
        count, token_ids = original(self, slots, num_steps, step_id, cut)
        found.extend([True] * count + [False] * (count < num_steps))
        return count, token_ids

    monkeypatch.setattr(FusedExecutor, "decode", decode)
    return found


def outputs(host: ModelHost, requests: list[Request]) -> list[list[int]]:
    host.init_cache(NUM_BLOCKS, 0)
    return [request.output for request in driver_of(host).run(requests)]


def test_the_tokens_are_those_of_the_long_way(host: ModelHost, decoded: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = outputs(host, prompts())
    assert decoded
    assert all(decoded)
    monkeypatch.setattr(FusedExecutor, "decode", lambda self, *steps: (0, b""))
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


def start(slot: int, token_ids: list[int], blocks: list[int], sampling: SamplingParams = GREEDY) -> StepPlan:
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


SAMPLED = SamplingParams(temperature=0.9, top_p=0.9)


def run_of(host: ModelHost, num_steps: int, num_runs: int, sampling: SamplingParams) -> list[StepResult]:
    """What ``num_runs`` plans of ``num_steps`` decodes of two sequences yield."""
    host.init_cache(NUM_BLOCKS, 0)
    host.step(start(0, [1, 2, 3], [3, 8], sampling))
    host.step(start(1, [4, 5], [4, 1], sampling))
    plans = [StepPlan(step_id=1 + i * num_steps, decodes=pack_token_ids([0, 1]), num_steps=num_steps) for i in range(num_runs)]
    return [result for plan in plans for result in host.steps(plan, no_cut())]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_run_is_one_result_with_the_tokens_of_its_steps(host: ModelHost, decoded: list[bool], sampling: SamplingParams) -> None:
    singles = run_of(host, 1, 12, sampling)
    runs = run_of(host, 6, 2, sampling)
    assert [(one.step_id, one.num_steps) for one in runs] == [(1, 6), (7, 6)]
    assert all(one.slots == pack_token_ids([0, 1]) for one in runs)
    assert b"".join(one.token_ids for one in runs) == b"".join(one.token_ids for one in singles)
    assert decoded == [True] * 24


def test_a_run_of_rows_that_are_not_plain_is_answered_step_by_step(host: ModelHost, decoded: list[bool]) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    singles, run = run_of(host, 1, 5, sampling), run_of(host, 5, 1, sampling)
    assert [(one.step_id, one.num_steps, one.token_ids) for one in run] == [(one.step_id, 1, one.token_ids) for one in singles]
    assert not any(decoded)


def test_a_row_that_fails_within_a_run_leaves_the_others_as_they_were(host: ModelHost, decoded: list[bool]) -> None:
    expected = [unpack_token_ids(one.token_ids).tolist()[1] for one in run_of(host, 1, 6, GREEDY)]
    host.init_cache(NUM_BLOCKS, 0)
    host.step(start(0, list(range(1, 14)), [3]))  # three more positions fit
    host.step(start(1, [4, 5], [4, 1]))
    decoded.clear()
    results = list(host.steps(StepPlan(step_id=1, decodes=pack_token_ids([0, 1]), num_steps=6), no_cut()))
    assert [(one.step_id, one.num_steps) for one in results] == [(1, 3), (4, 1), (5, 1), (6, 1)]
    assert [[error.slot for error in one.errors] for one in results] == [[], [0], [], []]
    assert all(one.slots == pack_token_ids([1]) for one in results[1:])
    tokens = unpack_token_ids(results[0].token_ids).reshape(3, 2)[:, 1].tolist()
    assert tokens + [unpack_token_ids(one.token_ids).item() for one in results[1:]] == expected
    assert decoded == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    "sampling",
    [
        *({}, {"temperature": 0.7, "top_p": 0.5, "top_k": 5, "min_p": 0.1}, {"max_tokens": 5, "stop_token_ids": (3,), "ignore_eos": True}),
        *({"stop": ("x",), "skip_special_tokens": False}, {"prompt_logprobs": 1}, {"logprobs": 0}),
        *({"repetition_penalty": 0.9}, {"presence_penalty": -1.0}, {"frequency_penalty": 0.5}),
        *({"logit_bias": {1: 0.0}}, {"min_tokens": 1}, {"bad_words_token_ids": ((1,),)}),
    ],
    ids=str,
)
def test_the_engine_counts_as_plain_what_the_operator_does(host: ModelHost, decoded: list[bool], sampling: dict[str, Any]) -> None:
    params = SamplingParams(**sampling)
    host.step(start(0, [1, 2, 3], [3], params))
    host.step(StepPlan(step_id=1, decodes=pack_token_ids([0])))
    assert decoded == [is_plain(params)]


@pytest.mark.parametrize("plain", [True, False], ids=["in the operator", "step by step"])
def test_a_run_is_cut_before_a_step_that_is_forbidden(host: ModelHost, decoded: list[bool], plain: bool) -> None:
    sampling = GREEDY if plain else SamplingParams(temperature=0.0, repetition_penalty=1.5)
    singles = run_of(host, 1, 6, sampling)
    host.init_cache(NUM_BLOCKS, 0)
    host.step(start(0, [1, 2, 3], [3, 8], sampling))
    host.step(start(1, [4, 5], [4, 1], sampling))
    last = np.array([1], np.int64)
    cut = RunCut(last)
    run = StepPlan(step_id=1, decodes=pack_token_ids([0, 1]), num_steps=6)
    assert list(host.steps(run, cut)) == [StepResult(step_id=1, num_steps=0, num_cut=6)]
    found = []
    last[0] = 0
    for result in host.steps(run, cut):
        found.append(result)
        last[0] = result.step_id + result.num_steps + 2  # too late, where the operator has done all of them
    tokens = b"".join(one.token_ids for one in found)
    num_steps = sum(one.num_steps for one in found)
    assert (num_steps, found[-1].num_cut) == ((6, 0) if plain else (1, 5))
    assert tokens == b"".join(one.token_ids for one in singles[:num_steps])
    rest = StepPlan(step_id=20, decodes=run.decodes, num_steps=6 - num_steps)
    if not plain:
        assert b"".join(one.token_ids for one in host.steps(rest, no_cut())) == b"".join(one.token_ids for one in singles[1:])


def test_the_operator_looks_between_its_steps(host: ModelHost) -> None:
    """The cell that it looks at is where it writes its third token: from then on every step up to that number is forbidden."""
    assert host.batch is not None
    host.step(start(0, [1, 2, 3], [3, 8]))
    cell = host.batch.tokens[0, 6:8].view(np.int64)
    (result,) = host.steps(StepPlan(step_id=1, decodes=pack_token_ids([0]), num_steps=16), RunCut(cell))
    assert cell[0] > 16
    assert (result.num_steps, result.num_cut) == (3, 13)
    assert host.batch.num_tokens[0] == 4 + 3
