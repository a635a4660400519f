"""Each sampling parameter does what it says, in the middle of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import GrammarSpec, SamplingParams
from fastengine.worker.model_host import ModelHost
from fastengine.worker.sampler import forbidden_next
from tests.worker.conftest import driver_of
from tests.worker.driver import GREEDY, Driver, Request
from tests.worker.models import NUM_BLOCKS

PROMPT = [5, 6, 7, 8]
EOS = 2


def run_one(driver: Driver, max_new: int = 8, **params: object) -> Request:
    """A greedy request with ``params``, between two plain ones that must not be touched by them."""
    plain, request, _ = driver.run(
        [Request(PROMPT, max_new), Request(PROMPT, max_new, SamplingParams(temperature=0.0, **params)), Request(PROMPT, max_new)]
    )
    (reference,) = driver.run([Request(PROMPT, max_new)])
    assert plain.output == reference.output
    return request


def test_logit_bias_forces_and_forbids(llama: Driver) -> None:
    assert run_one(llama, logit_bias={77: 100.0}).output == [77] * 8
    (free,) = llama.run([Request(PROMPT, 1)])
    assert run_one(llama, 1, logit_bias={free.output[0]: -100.0}).output != free.output


def test_min_tokens_holds_back_the_end(llama: Driver) -> None:
    wants_to_end = {EOS: 300.0, 99: 200.0, 42: 100.0}
    assert run_one(llama, 5, logit_bias=wants_to_end).output == [EOS] * 5
    held_back = run_one(llama, 5, logit_bias=wants_to_end, min_tokens=3, stop_token_ids=(99,))
    assert held_back.output[:3] == [42] * 3
    assert held_back.output[3:] == [EOS] * 2


def test_bad_words_are_never_completed(llama: Driver) -> None:
    bias = {10: 60.0, 11: 50.0, 12: 40.0}
    assert run_one(llama, 4, logit_bias=bias, bad_words_token_ids=((10,),)).output == [11] * 4
    assert run_one(llama, 4, logit_bias=bias, bad_words_token_ids=((10, 10),)).output == [10, 11, 10, 11]


def test_forbidden_next_looks_at_the_output_alone() -> None:
    words = ((1,), (2, 3), (4, 5, 6), (), (900,))
    output = np.array([4, 5], dtype=np.int32)
    assert forbidden_next(words, output, 100).tolist() == [1, 6]
    assert forbidden_next(words, np.array([2], dtype=np.int32), 100).tolist() == [1, 3]
    assert forbidden_next(words, np.array([], dtype=np.int32), 100).tolist() == [1]


def test_presence_and_frequency_count_the_output(llama: Driver) -> None:
    bias = {30: 1000.0, 31: 950.0}
    assert run_one(llama, 4, logit_bias=bias).output == [30] * 4
    assert run_one(llama, 4, logit_bias=bias, presence_penalty=100.0).output == [30, 31, 30, 30]
    assert run_one(llama, 6, logit_bias=bias, frequency_penalty=100.0).output == [30, 31] * 3
    prompt_only = {PROMPT[0]: 1000.0, 31: 950.0}
    assert run_one(llama, 1, logit_bias=prompt_only, presence_penalty=100.0).output == PROMPT[:1]


def test_repetition_penalty_counts_the_prompt_too(llama: Driver) -> None:
    (free,) = llama.run([Request(PROMPT, 1)])
    seen = free.output[0]
    once, twice = llama.run([Request([*PROMPT, seen], 1), Request([*PROMPT, seen], 1, SamplingParams(temperature=0.0, repetition_penalty=1000.0))])
    assert not {*PROMPT, seen}.intersection(twice.output)
    assert once.output == run_one(llama, 2).output[1:]


def test_logprobs_are_of_the_raw_logits(llama: Driver) -> None:
    plain, biased = llama.run(
        [
            Request(PROMPT, 3, SamplingParams(temperature=0.0, logprobs=4)),
            Request(PROMPT, 3, SamplingParams(temperature=0.0, logprobs=0, logit_bias={77: 100.0})),
        ]
    )
    assert [len(entry.top_ids) for entry in plain.logprobs] == [4, 4, 4]
    for entry, token in zip(plain.logprobs, plain.output, strict=True):
        assert entry.top_ids[0] == token
        assert entry.rank == 1
        assert entry.logprob == pytest.approx(entry.top_logprobs[0])
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
    assert biased.output == [77] * 3
    assert biased.logprobs[0].top_ids == []
    assert biased.logprobs[0].rank > 1
    assert biased.logprobs[0].logprob < plain.logprobs[0].logprob


def test_prompt_logprobs_whatever_the_chunks(llama: Driver) -> None:
    prompt = list(range(20, 60))
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    whole, _ = llama.run([Request(prompt, 2, params), Request(PROMPT, 4)])
    assert len(whole.prompt_logprobs) == len(prompt) - 1
    pieces, _ = llama.run([Request(prompt, 2, params), Request(PROMPT, 4)], lambda: 7)
    for a, b in zip(whole.prompt_logprobs, pieces.prompt_logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert len(a.top_ids) == 2
    (extended,) = llama.run([Request(prompt[:-1], 1, SamplingParams(temperature=0.0, logprobs=0, logit_bias={prompt[-1]: 1000.0}))])
    assert extended.output == prompt[-1:]
    assert extended.logprobs[0].logprob == pytest.approx(whole.prompt_logprobs[-1].logprob, abs=1e-4)


def test_top_k_of_one_is_greedy(llama: Driver) -> None:
    greedy, narrow, nucleus = llama.run(
        [
            Request(PROMPT, 6, GREEDY),
            Request(PROMPT, 6, SamplingParams(temperature=2.0, top_k=1), seed=3),
            Request(PROMPT, 6, SamplingParams(temperature=2.0, top_p=1e-6), seed=4),
        ]
    )
    assert greedy.output == narrow.output == nucleus.output


def test_draws_follow_the_distribution(llama: Driver) -> None:
    params = SamplingParams(temperature=1.0, logit_bias={10: 50.0, 11: 50.0 + math.log(3.0)})
    raw = run_one(llama, 1, logprobs=0, logit_bias={10: 90.0}).logprobs[0].logprob
    other = run_one(llama, 1, logprobs=0, logit_bias={11: 90.0}).logprobs[0].logprob
    share = 3 * np.exp(other - raw) / (1 + 3 * np.exp(other - raw))
    requests = llama.run([Request(PROMPT, 1, params, seed=seed) for seed in range(400)])
    drawn = np.array([request.output[0] for request in requests])
    assert set(drawn.tolist()) <= {10, 11}
    assert abs((drawn == 11).mean() - share) < 4 * np.sqrt(share * (1 - share) / len(drawn))


def test_processed_logprobs_are_of_what_is_drawn_from(make_host, golden) -> None:
    host = make_host(golden / "llama", logprobs_mode="processed")
    ways = [
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, logprobs=1, logit_bias={77: 1000.0}),
        SamplingParams(temperature=0.5, logprobs=1),
        SamplingParams(temperature=0.0, logprobs=1, grammar=GrammarSpec("choice", '["Z"]')),
    ]
    plain, biased, cooled, bound = (request.logprobs[0] for request in driver_of(host).run([Request(PROMPT, 1, way, seed=1) for way in ways]))
    (raw,) = driver_of(make_host(golden / "llama")).run([Request(PROMPT, 1, SamplingParams(temperature=0.0, logprobs=1))])
    assert plain.logprob == pytest.approx(raw.logprobs[0].logprob, abs=1e-4)
    assert biased.logprob == pytest.approx(0.0, abs=1e-5)
    assert bound.logprob == pytest.approx(0.0, abs=1e-5)
    assert cooled.top_ids == plain.top_ids
    assert cooled.top_logprobs[0] > plain.top_logprobs[0] + 1e-3


def test_a_row_that_an_operator_refuses_fails_alone(llama_host: ModelHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever got past the rules: the rows beside it must not notice."""
    monkeypatch.setattr("fastengine.worker.sampling_table.check_sampling", lambda params, vocab_size: None)
    llama_host.init_cache(NUM_BLOCKS, 0)
    driver = driver_of(llama_host)
    ways: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1e-300},
        {"temperature": 1.0, "logprobs": 2, "presence_penalty": 0.5},
        {"repetition_penalty": -1.0, "logprobs": 2},
        {"logit_bias": {7: 3.0}},
        {"grammar": GrammarSpec("regex", "[a-z]{20}")},
    ]
    params = [SamplingParams(**{"temperature": 0.0, **way}) for way in ways]
    bad = {1, 3}
    together = driver.run([Request(PROMPT, 4, sampling, seed=i) for i, sampling in enumerate(params)])
    for i, request in enumerate(together):
        if i in bad:
            assert request.error is not None
            assert "repetition" in request.error.message
        else:
            (alone,) = driver.run([Request(PROMPT, 4, params[i], seed=i)])
            assert (request.error, request.output, len(request.logprobs)) == (None, alone.output, len(alone.logprobs))


@pytest.mark.parametrize(
    "way", [{"top_k": 10**12}, {"seed": 2**70}, {"logprobs": 10**6}, {"prompt_logprobs": 257}, {"min_tokens": 2.5}, {"temperature": "hot"}]
)
def test_values_that_the_table_cannot_hold_fail_their_row_alone(llama: Driver, way: dict[str, Any]) -> None:
    good, bad = llama.run([Request(PROMPT, 3), Request(PROMPT, 3, SamplingParams(**{"temperature": 1.0, **way}))])
    assert len(good.output) == 3
    assert bad.error is not None
    assert next(iter(way)) in bad.error.message
