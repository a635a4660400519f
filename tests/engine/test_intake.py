"""What is refused, what expires, and what aborts do in each state."""

from __future__ import annotations

import pytest

from fastengine.engine.request_state import IllegalTransition, RequestStatus
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from tests.engine.driver import Driver
from tests.engine.test_scheduling import status
from tests.engine.test_steps import assert_right, prompt


def refused(driver: Driver, tokens: list[int], **fields: object) -> tuple[int, str, str | None]:
    one = driver.add(tokens, **fields)
    driver.deliver()
    assert one.finish_reason == "error"
    assert one.error is not None
    return one.error.code, one.error.message, one.error.param


def test_prompts_that_can_not_be() -> None:
    driver = Driver(num_blocks=10)
    assert refused(driver, [])[0::2] == (400, "prompt")
    assert refused(driver, [5, 64])[0::2] == (400, "prompt")
    assert refused(driver, [5, -1])[0::2] == (400, "prompt")
    code, message, param = refused(driver, prompt(1, 256))
    assert (code, param) == (400, "prompt")
    assert "256 tokens" in message
    assert refused(driver, [5], max_tokens=0)[0::2] == (400, "max_tokens")
    assert not driver.core.has_work()


def test_what_can_never_fit_the_pool_says_so_with_numbers() -> None:
    driver = Driver(num_blocks=10)
    code, message, param = refused(driver, prompt(1, 50), max_tokens=40)
    assert (code, param) == (400, "max_tokens")
    assert "12 KV blocks" in message
    assert "pool has 10" in message
    assert refused(driver, prompt(1, 81))[0::2] == (400, "prompt")
    fits = driver.add(prompt(1, 50), max_tokens=31, ignore_eos=True)
    driver.run()
    assert_right(fits)


def test_an_id_in_use_is_a_409_until_it_is_free() -> None:
    driver = Driver()
    driver.add(prompt(1, 5), request_id="same", max_tokens=3)
    assert refused(driver, prompt(1, 5), request_id="same")[0] == 409
    driver.run()
    assert_right(driver.add_and_run(prompt(1, 5), request_id="same", max_tokens=3))


def test_full_queues_are_429_with_retry_after() -> None:
    driver = Driver(max_waiting_requests=3)
    for i in range(3):
        driver.add(prompt(i, 5), max_tokens=3)
    one = driver.add(prompt(4, 5))
    driver.deliver()
    assert one.error is not None
    assert one.error.code == 429
    assert one.error.retry_after_s
    driver.run()
    driver = Driver(max_queued_tokens=20)
    driver.add(prompt(1, 15), max_tokens=3)
    assert refused(driver, prompt(2, 6))[0] == 429
    driver.add(prompt(3, 5), max_tokens=3)
    driver.run()


def test_timeouts_end_requests_wherever_they_are() -> None:
    driver = Driver(max_num_seqs=1)
    running = driver.add(prompt(1, 5), timeout_s=0.5, ignore_eos=True, max_tokens=200)
    waiting = driver.add(prompt(2, 5), timeout_s=0.5)
    late = driver.add(prompt(2, 5), timeout_s=0.5, arrival_time_s=driver.time - 0.2)
    driver.turn()
    deadline = driver.core.next_deadline()
    assert deadline is not None
    assert deadline == pytest.approx(driver.time - 0.001 + 0.3)
    driver.time = deadline
    driver.turn()
    assert late.error is not None
    assert late.error.code == 504
    assert waiting.error is None
    driver.time += 0.3
    driver.turn()
    for one in (running, waiting):
        assert one.error is not None
        assert one.error.code == 504
    assert running.num_output_tokens == len(running.tokens) > 0
    driver.run()
    driver.assert_idle()
    assert driver.core.next_deadline() is None


def test_waiting_too_long_is_a_503_but_running_is_not() -> None:
    driver = Driver(max_num_seqs=1, max_waiting_time=1.0)
    running = driver.add(prompt(1, 5), ignore_eos=True, max_tokens=100)
    driver.turn()
    waiting = driver.add(prompt(2, 5))
    driver.time += 1.1
    driver.turn()
    assert waiting.error is not None
    assert (waiting.error.code, waiting.error.retry_after_s) == (503, 1.0)
    driver.run()
    assert_right(running)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("turns", range(9))
def test_abort_at_any_moment_gives_everything_back(overlap: bool, turns: int) -> None:
    driver = Driver(overlap=overlap, max_num_batched_tokens=8, num_blocks=12)
    aborted = driver.add(prompt(1, 20), ignore_eos=True, max_tokens=40)
    other = driver.add(prompt(2, 20), ignore_eos=True, max_tokens=20)
    for _ in range(turns):
        driver.turn()
    driver.abort(aborted)
    driver.abort(aborted)  # idempotent
    driver.core.abort_handles(0, [12345])
    third = driver.add(prompt(3, 20), ignore_eos=True, max_tokens=20)
    driver.run()
    assert_right(other)
    assert_right(third)
    driver.assert_idle()


def test_abort_of_preempted_requests() -> None:
    driver = Driver(num_blocks=4)
    received = [driver.add(prompt(i, 6), max_tokens=20, ignore_eos=True) for i in range(3)]
    while not any(s.status is RequestStatus.PREEMPTED for s in driver.core._table):
        driver.turn()
    for one in received:
        if not one.finish_reason and status(driver, one) is RequestStatus.PREEMPTED:
            driver.abort(one)
    driver.run()
    assert_right(received[0])
    driver.assert_idle()


def test_a_client_that_is_gone_takes_its_requests_along() -> None:
    driver = Driver()
    gone = [driver.add(prompt(i, 6), client=1, max_tokens=20, ignore_eos=True) for i in range(3)]
    stays = driver.add(prompt(5, 6), client=0, max_tokens=20, ignore_eos=True)
    for _ in range(5):
        driver.turn()
    driver.publish()
    driver.answer()
    driver.core.client_gone(1)
    for one in gone:
        one.gone = True
    driver.run()
    assert_right(stays)
    driver.assert_idle()


def test_nothing_leaves_finished() -> None:
    from fastengine.engine.request_state import RequestState

    request = GenerateRequest(request_id="x", client_index=0, handle=0, prompt_token_ids=b"\0" * 4, sampling=SamplingParams())
    state = RequestState(request, arrival_number=1, arrived_at=0.0, end=3, seed=0)
    with pytest.raises(IllegalTransition):
        state.transition(RequestStatus.PREEMPTED)
    state.transition(RequestStatus.FINISHED)
    for to in RequestStatus:
        with pytest.raises(IllegalTransition):
            state.transition(to)


def test_sampling_settings_that_fit_no_message_are_refused_by_name() -> None:
    driver = Driver()
    code, message, param = refused(driver, prompt(1, 5), max_tokens=2, logit_bias=dict.fromkeys(range(100000), 1.0))
    assert (code, param) == (400, "logit_bias")
    assert "1048576 are allowed" in message


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_an_abort_counts_as_what_it_was_for(reason: str) -> None:
    driver = Driver()
    one = driver.add(prompt(1, 5), max_tokens=50, ignore_eos=True)
    for _ in range(6):
        driver.turn()
    driver.core.abort_handles(0, [one.request.handle], reason)
    one.gone = True
    driver.run()
    assert {name: count for name, count in driver.core.metrics.finished.items() if count} == {reason: 1}
