"""Steps: batching, chunks, seeds, slots, swapping, and rows that fail alone."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.protocol.requests import GrammarSpec, SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids
from fastengine.worker.batch import StepRows
from fastengine.worker.model_host import ModelHost
from fastengine.worker.model_runner import NULL_TOKEN, NullExecutor
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import GREEDY, Driver, Request
from tests.worker.models import BLOCK_SIZE, NUM_BLOCKS, hf_config, random_weights, write_model

NUM_NEW = 12


def mixed_requests(vocab_size: int, count: int, longest: int = 70) -> list[Request]:
    """Requests of many lengths, arrival times and ways to sample; every other one greedy."""
    rng = np.random.default_rng(5)
    ways = [
        GREEDY,
        SamplingParams(temperature=0.8),
        GREEDY,
        SamplingParams(temperature=1.3, top_p=0.9, top_k=40),
        GREEDY,
        SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={7: 2.0}),
        SamplingParams(temperature=1.0, logprobs=3),
    ]
    return [
        Request(
            rng.integers(3, vocab_size, int(rng.integers(1, longest))).tolist(),
            int(rng.integers(4, NUM_NEW + 1)),
            ways[i % len(ways)],
            seed=1000 + i,
            arrival_step=int(rng.integers(0, 8)),
        )
        for i in range(count)
    ]


def alone(host: ModelHost, requests: list[Request]) -> list[list[int]]:
    """Each request's output when nothing else runs."""
    answers = []
    for request in requests:
        host.init_cache(NUM_BLOCKS, 0)
        copy = Request(request.prompt, request.max_new, request.sampling, request.seed)
        answers.append(driver_of(host).run([copy])[0].output)
    return answers


def test_a_request_alone_and_in_a_batch(llama_host: ModelHost) -> None:
    requests = mixed_requests(256, 32)
    expected = alone(llama_host, requests)
    host_rng = np.random.default_rng(1)
    llama_host.init_cache(NUM_BLOCKS, 0)
    driver_of(llama_host).run(requests, lambda: int(host_rng.integers(1, 40)))
    assert [request.output for request in requests] == expected
    assert not any(request.error for request in requests)


def test_a_request_alone_and_in_a_batch_of_the_default_model(smollm2_host: ModelHost) -> None:
    requests = mixed_requests(49_000, 32, longest=30)
    chosen = [request for request in requests if request.sampling is GREEDY][:4]
    expected = alone(smollm2_host, chosen)
    smollm2_host.init_cache(NUM_BLOCKS, 0)
    driver_of(smollm2_host).run(requests)
    assert [request.output for request in chosen] == expected


def test_seeds_decide(llama: Driver) -> None:
    sampling = SamplingParams(temperature=1.5)
    prompt = [5, 6, 7]
    same, again, other = llama.run([Request(prompt, 10, sampling, seed=seed) for seed in (1, 1, 2)])
    assert same.output == again.output
    assert same.output != other.output


def test_more_requests_than_slots_reuse_them(llama_host: ModelHost) -> None:
    host = llama_host
    host.init_cache(NUM_BLOCKS, 0)
    requests = mixed_requests(256, 12)
    expected = alone(host, requests)
    host.init_cache(NUM_BLOCKS, 0)
    few_slots = Driver(host.step, max_num_seqs=3, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    few_slots.run(requests)
    assert [request.output for request in requests] == expected


def started(slot: int, prompt: list[int], blocks: list[int], **more: object) -> StartedSequence:
    values = {"sampling": GREEDY, "num_prompt": len(prompt), "num_computed": 0, **more}
    return StartedSequence(slot=slot, token_ids=pack_token_ids(prompt), block_ids=pack_token_ids(blocks), **values)


def chunk(step_id: int, slot: int, start: int, length: int, **more: object) -> StepPlan:
    columns = {"chunk_slots": [slot], "chunk_starts": [start], "chunk_lengths": [length]}
    return StepPlan(step_id=step_id, **{name: pack_token_ids(values) for name, values in columns.items()}, **more)


def test_a_cached_prefix_and_a_recomputed_sequence_go_on_alike(llama_host: ModelHost) -> None:
    host = llama_host
    host.init_cache(NUM_BLOCKS, 0)
    prompt = list(range(10, 10 + 2 * BLOCK_SIZE + 3))
    (request,) = driver_of(host).run([Request(prompt, 8)])
    host.init_cache(NUM_BLOCKS, 0)
    host.step(chunk(0, 4, 0, len(prompt), started=[started(4, prompt, [0, 1, 2, 3])]))
    shared = chunk(1, 5, 2 * BLOCK_SIZE, 3, started=[started(5, prompt, [0, 1, 9, 10], num_computed=2 * BLOCK_SIZE)])
    assert unpack_token_ids(host.step(shared).token_ids).tolist() == request.output[:1]
    known = prompt + request.output[:4]
    preempted = started(6, known, [20, 21, 22, 23], num_prompt=len(prompt))
    result = host.step(chunk(2, 6, 0, len(known), released=pack_token_ids([4]), started=[preempted]))
    assert unpack_token_ids(result.token_ids).tolist() == request.output[4:5]


def test_swapped_blocks_come_back(golden) -> None:
    host = loaded_host(golden / "llama", num_host_blocks=4)
    prompt = list(range(10, 10 + 2 * BLOCK_SIZE))
    (request,) = driver_of(host).run([Request(prompt, 4)])
    host.init_cache(NUM_BLOCKS, 4)
    host.step(chunk(0, 0, 0, len(prompt), started=[started(0, prompt, [3, 5])]))
    host.step(chunk(1, 1, 0, len(prompt), swap_out=pack_token_ids([3, 2, 5, 0]), started=[started(1, prompt[::-1], [3, 5, 6])]))
    extended = [*prompt, request.output[0]]
    resumed = started(2, extended, [8, 9, 10], num_prompt=len(prompt), num_computed=len(prompt))
    result = host.step(chunk(2, 2, len(prompt), 1, swap_in=pack_token_ids([2, 8, 0, 9]), started=[resumed]))
    assert unpack_token_ids(result.token_ids).tolist() == request.output[1:2]


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (started(1, [5, 256], [1]), "token ids must be in"),
        (started(1, [-1], [1]), "token ids must be in"),
        (started(1, [], [1]), "at least one"),
        (started(1, [5] * 300, [1]), "exceeds"),
        (started(1, [5] * 9, [1]), "positions of KV"),
        (started(1, [5], [1], sampling=SamplingParams(grammar=GrammarSpec("regex", "("))), "regex: "),
        (started(1, [5], [1], sampling=SamplingParams(logit_bias={256: 1.0})), "logit_bias"),
    ],
)
def test_a_bad_row_fails_alone(llama_host: ModelHost, sequence: StartedSequence, words: str) -> None:
    host = llama_host
    host.init_cache(NUM_BLOCKS, 0)
    length = len(sequence.token_ids) // 4 or 1
    plan = StepPlan(
        step_id=0,
        started=[started(0, [5, 6], [0]), sequence],
        chunk_slots=pack_token_ids([0, 1]),
        chunk_starts=pack_token_ids([0, 0]),
        chunk_lengths=pack_token_ids([2, length]),
    )
    result = host.step(plan)
    assert unpack_token_ids(result.slots).tolist() == [0]
    (error,) = result.errors
    assert error.slot == 1
    assert words in error.message
    # The engine may have sent the next plan already: the failed slot is left out, and said once.
    result = host.step(StepPlan(step_id=1, decodes=pack_token_ids([0, 1])))
    assert unpack_token_ids(result.slots).tolist() == [0]
    assert not result.errors
    plan = StepPlan(step_id=2, released=pack_token_ids([1]), started=[started(1, [5, 6], [2])], chunk_slots=pack_token_ids([1]),
                    chunk_starts=pack_token_ids([0]), chunk_lengths=pack_token_ids([2]))  # fmt: skip
    assert unpack_token_ids(host.step(plan).slots).tolist() == [1]


def test_values_that_are_not_finite_fail_their_row_alone(tmp_path) -> None:
    config = hf_config()
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][7] = np.nan
    host = loaded_host(write_model(tmp_path, config, weights))
    good, bad = driver_of(host).run([Request([3, 4, 5], 3), Request([3, 7, 5], 3)])
    assert len(good.output) == 3
    assert bad.error is not None
    assert "not finite" in bad.error.message


@pytest.mark.parametrize("quantization", ["none", "wint8"])
def test_a_head_that_is_not_finite_is_an_error(tmp_path, quantization: str) -> None:
    config = hf_config(tie_word_embeddings=False)
    weights = random_weights(config)
    weights["lm_head.weight"][:] = np.nan
    host = loaded_host(write_model(tmp_path, config, weights), quantization=quantization, block_size=16)
    for request in driver_of(host).run([Request([3, 4, 5], 3), Request([3, 4, 5], 3, SamplingParams(temperature=0.7, top_p=0.9))]):
        assert request.error is not None
        assert "not finite" in request.error.message


def test_null_model_yields_its_token(tmp_path) -> None:
    host = loaded_host(write_model(tmp_path, hf_config(), {}), load_format="null")
    assert host.num_blocks_that_fit() > 0
    requests = driver_of(host).run(mixed_requests(128, 8))
    assert all(request.output == [NULL_TOKEN] * request.max_new for request in requests)


def test_a_step_of_the_null_model_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fastengine.worker.model_runner.time.sleep", slept.append)
    row = np.zeros(1, dtype=np.int32)
    for step_s in (0.0, 0.25):
        executed = NullExecutor(step_s).execute(StepRows(row, row, row + 1, 1), row)
        assert executed.token_ids.tolist() == [NULL_TOKEN]
    assert slept == [0.25]
