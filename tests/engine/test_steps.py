"""Requests go in, plans come out, tokens are right: the ordinary life of requests."""

from __future__ import annotations

import pytest

from fastengine.protocol.outputs import INVALID_GRAMMAR
from tests.engine.driver import MAX_MODEL_LEN, Driver, Received
from tests.engine.fake_worker import EOS, reference_output


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 61 for i in range(length)]


def assert_right(received: Received, weights: int = 1, max_total: int = MAX_MODEL_LEN) -> None:
    from tests.engine.fake_worker import ints

    tokens, reason = reference_output(ints(received.request.prompt_token_ids), received.request.sampling, max_total, weights)
    assert received.error is None
    assert received.tokens == tokens
    assert received.finish_reason == reason
    assert received.stop_token_id == (tokens[-1] if reason == "stop" else None)
    assert received.num_output_tokens == len(tokens)


@pytest.fixture(params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
def test_a_mix_of_requests_gets_the_tokens_each_would_get_alone(overlap: bool, caching: bool) -> None:
    driver = Driver(overlap=overlap, enable_prefix_caching=caching, num_blocks=200)
    all_received = []
    for i in range(40):
        all_received.append(driver.add(prompt(i % 7, 1 + (i * 13) % 60), client=i % 3, max_tokens=1 + i % 23, ignore_eos=i % 2 == 0))
        if i % 3 == 0:
            driver.turn()
    driver.run()
    for received in all_received:
        assert_right(received)
    driver.assert_idle()


def test_without_max_tokens_it_runs_to_the_models_length(overlap: bool) -> None:
    driver = Driver(overlap=overlap, max_model_len=40)
    received = driver.add(prompt(1, 5), ignore_eos=True)
    clipped = driver.add(prompt(2, 5), ignore_eos=True, max_tokens=10_000)
    driver.run()
    for one in (received, clipped):
        assert_right(one, max_total=40)
        assert len(one.tokens) == 35


def test_without_max_tokens_it_runs_to_the_pools_end() -> None:
    driver = Driver(num_blocks=4)
    received = driver.add(prompt(1, 5), ignore_eos=True)
    driver.run()
    # 32 positions hold KV; the 33rd token is sampled and not computed.
    assert len(received.tokens) == 33 - 5
    assert received.finish_reason == "length"


def test_a_single_token_of_output(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    received = [driver.add(prompt(i, 1 + 8 * i), max_tokens=1) for i in range(4)]
    driver.run()
    for one in received:
        assert_right(one)
    driver.assert_idle()


def test_a_prompt_of_the_models_length_may_have_the_one_token_that_is_not_computed(overlap: bool) -> None:
    driver = Driver(overlap=overlap, max_model_len=40, max_num_batched_tokens=16)
    neighbours = [driver.add(prompt(i, 5), max_tokens=35, ignore_eos=True) for i in range(2)]
    full = [driver.add(prompt(9, 40), max_tokens=1, prompt_logprobs=0) for _ in range(2)]
    driver.run()
    for one in (*neighbours, *full):
        assert_right(one, max_total=41 if one in full else 40)
    assert len(full[0].prompt_logprobs or ()) == 40
    refused = driver.add(prompt(9, 41), max_tokens=1)
    driver.run()
    assert refused.error is not None
    assert (refused.error.code, refused.error.param) == (400, "prompt")
    driver.assert_idle()


def test_stop_token_ids_and_min_tokens(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    plain, _ = reference_output(prompt(3, 9), driver.add(prompt(3, 9), max_tokens=30, ignore_eos=True).request.sampling, MAX_MODEL_LEN)
    stop = next(token for token in plain[4:] if token not in plain[:4] and token != EOS)
    at = plain.index(stop)
    stopped = driver.add(prompt(3, 9), max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    later = driver.add(prompt(3, 9), max_tokens=30, ignore_eos=True, stop_token_ids=(stop,), min_tokens=at + 2)
    outside = driver.add(prompt(3, 9), max_tokens=5, ignore_eos=True, stop_token_ids=(10_000_000, -5))
    driver.run()
    assert stopped.tokens == plain[: at + 1]
    assert stopped.stop_token_id == stop
    assert len(later.tokens) > at + 1
    for received in (stopped, later, outside):
        assert_right(received)


def test_log_probabilities_come_with_their_tokens(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    received = driver.add(prompt(1, 20), max_tokens=9, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    again = driver.add(prompt(1, 20), max_tokens=9, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    plain = driver.add(prompt(2, 20), max_tokens=9, ignore_eos=True)
    driver.run()
    for one in (received, again):
        assert [item.logprob for item in one.logprobs] == [-float(token) for token in one.tokens]
        assert one.prompt_logprobs is not None
        assert one.prompt_logprobs[0] is None
        assert [item.logprob for item in one.prompt_logprobs[1:]] == [-float(token) for token in prompt(1, 20)[1:]]
    assert_right(plain)
    assert not plain.logprobs


def test_a_failing_row_fails_alone(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    good = [driver.add(prompt(i, 12), max_tokens=20, ignore_eos=True) for i in range(3)]
    bad = driver.add(prompt(0, 12), max_tokens=20, ignore_eos=True, request_id="bad")
    for _ in range(6):
        driver.turn()
    driver.worker.failing.add("bad")
    driver.run()
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert (bad.error.code, bad.error.reason) == (400, INVALID_GRAMMAR)
    assert "grammar" in bad.error.message
    for received in good:
        assert_right(received)
    driver.assert_idle()


def test_overlap_keeps_two_steps_in_flight_and_no_overlap_one() -> None:
    for flag, expected in ((True, 2), (False, 1)):
        driver = Driver(overlap=flag)
        driver.add(prompt(1, 5), max_tokens=20, ignore_eos=True)
        driver.publish()
        assert driver.core.num_in_flight == expected


def test_no_row_is_planned_past_max_tokens(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    driver.add(prompt(1, 5), max_tokens=7, ignore_eos=True)
    driver.run()
    assert sum(driver.worker.step_tokens) == 5 + 6


def test_outputs_that_were_not_taken_are_merged() -> None:
    driver = Driver(overlap=False)
    received = [driver.add(prompt(i, 4), max_tokens=5, ignore_eos=True) for i in range(3)]
    other = driver.add(prompt(8, 4), max_tokens=50, ignore_eos=True, client=1)
    while driver.publish():
        driver.answer()
    driver.deliver()
    for one in [*received, other]:
        assert_right(one)
