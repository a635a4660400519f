"""The rings hold the largest messages that a configuration allows, two results at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastengine.config import EngineConfig
from fastengine.engine.request_state import ModelLimits
from fastengine.engine.ring_sizes import ring_sizes
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.worker_link import MIN_RING_BYTES, EngineBell, EngineEnd, RingSizes, WorkerEnd
from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import SlotEmbedding, SlotLogprobs, StartedSequence, StepPlan, StepResult
from fastengine.sampling_rules import MAX_TOP_LOGPROBS

LARGE_ID = (1 << 31) - 1
WIDEST = TopLogprobs(-1.2345678901234567, LARGE_ID, [LARGE_ID] * MAX_TOP_LOGPROBS, [-98.7654321987654321] * MAX_TOP_LOGPROBS)


def test_ordinary_settings_need_no_more_than_the_least() -> None:
    assert ring_sizes(EngineConfig.from_flags(model="m"), ModelLimits(8192, 50_000, hidden_size=576)) == RingSizes()


@pytest.mark.parametrize("num_tokens", [2048, 16_384])
def test_two_results_with_all_the_log_probabilities_there_can_be_fit(short_tmp: Path, num_tokens: int) -> None:
    config = EngineConfig.from_flags(model="m", max_num_batched_tokens=num_tokens, max_num_seqs=64)
    limits = ModelLimits(num_tokens, 50_000, hidden_size=4096)
    result = ENCODER.encode(
        StepResult(
            step_id=LARGE_ID,
            slots=bytes(4 * 64),
            token_ids=bytes(4 * 64),
            logprobs=[SlotLogprobs(slot, [WIDEST]) for slot in range(64)],
            prompt_logprobs=[SlotLogprobs(slot, [WIDEST] * (num_tokens // 64)) for slot in range(64)],
            embeddings=[SlotEmbedding(slot, bytes(4 * 4096)) for slot in range(64)],
        )
    )
    bell, engine = EngineBell(short_tmp), EngineEnd(short_tmp, 0, 1, ring_sizes(config, limits))
    rank = WorkerEnd(short_tmp, 0, 0, 1)
    for _ in range(9):  # round the ring's end, too
        rank.send(result)
        rank.send(result)
        assert [message for _, message in engine.receive()] == [result, result]
    assert (len(result) > MIN_RING_BYTES // 2) == (num_tokens == 16_384)
    for end in (rank, engine, bell):
        end.close()


def test_a_plan_that_starts_the_longest_sequence_fits(short_tmp: Path) -> None:
    max_model_len = 2_000_000
    config = EngineConfig.from_flags(model="m", block_size=8)
    tokens, blocks = bytes(4 * max_model_len), bytes(4 * (max_model_len // 8 + 1))
    started = StartedSequence(slot=1, token_ids=tokens, num_prompt=1, num_computed=0, block_ids=blocks, sampling=SamplingParams())
    plan = ENCODER.encode(StepPlan(step_id=1, started=[started], decodes=bytes(4 * 64)))
    bell, engine = EngineBell(short_tmp), EngineEnd(short_tmp, 0, 1, ring_sizes(config, ModelLimits(max_model_len, 50_000)))
    rank = WorkerEnd(short_tmp, 0, 0, 1)
    engine.publish(plan)
    assert rank.receive(0) == plan
    for end in (rank, engine, bell):
        end.close()
