"""Pauses and resumes: what was asked for holds when it is answered, and no text changes."""

from __future__ import annotations

import pytest

from fastengine.protocol.control import Pause, Resume, Sleep
from tests.engine.control_calls import busy, call_code, code, is_paused
from tests.engine.driver import Driver
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def test_pause_abort_ends_requests_with_what_they_have(overlap: bool) -> None:
    driver = Driver(overlap=overlap, max_num_seqs=2)
    received = busy(driver)
    assert driver.call(Pause()).result == {"is_paused": True}
    assert all(one.finish_reason == "abort" for one in received)
    assert received[0].num_output_tokens == len(received[0].tokens) > 0
    assert driver.core.num_in_flight == 0
    assert is_paused(driver)
    waits = driver.add(prompt(9, 5), max_tokens=5)
    driver.run()
    assert not waits.tokens
    assert call_code(driver, Resume()) == 200
    driver.run()
    assert_right(waits)
    driver.assert_idle()


@pytest.mark.parametrize("mode", ["in_place", "retract", "drain"])
def test_pauses_that_keep_requests_change_no_text(overlap: bool, mode: str) -> None:
    driver = Driver(overlap=overlap)
    received = busy(driver)
    assert call_code(driver, Pause(mode=mode)) == 200  # type: ignore[arg-type]
    blocks = driver.core.server_info()["gauges"]["available_gpu_block_num"]
    if mode == "drain":
        assert all(one.finish_reason == "length" for one in received)
    else:
        assert not any(one.finish_reason for one in received)
        assert (blocks == driver.num_blocks) == (mode == "retract")
    counts = [len(one.tokens) for one in received]
    late = driver.add(prompt(8, 4), max_tokens=3)
    driver.run()
    assert counts == [len(one.tokens) for one in received]
    assert call_code(driver, Resume()) == 200
    driver.run()
    for one in [*received, late]:
        assert_right(one)
    driver.assert_idle()


def test_drain_finishes_preempted_requests_but_starts_none() -> None:
    driver = Driver(num_blocks=6)
    received = [driver.add(prompt(i, 6), max_tokens=20, ignore_eos=True) for i in range(4)]
    while not driver.core.metrics.counters["num_preemptions"]:
        driver.turn()
    late = driver.add(prompt(8, 4), max_tokens=3)
    assert call_code(driver, Pause(mode="drain")) == 200
    started = [one for one in received if one.tokens]
    assert all(one.finish_reason for one in started)
    assert not late.tokens
    driver.call(Resume())
    driver.run()
    for one in [*received, late]:
        assert_right(one)


def test_a_pause_that_takes_too_long_leaves_the_engine_running() -> None:
    driver = Driver()
    received = busy(driver)
    pause = driver.control(Pause(mode="drain", timeout_s=0.01))
    for _ in range(12):
        driver.turn()
    assert code(driver, pause) == 504
    assert not is_paused(driver)
    late = driver.add(prompt(8, 4), max_tokens=3)
    driver.run()
    for one in [*received, late]:
        assert_right(one)


@pytest.mark.parametrize("overtaken_by", [Pause(mode="retract"), Pause(mode="abort"), Sleep()])
def test_a_drain_is_answered_200_only_if_all_that_ran_has_ended(overtaken_by: object) -> None:
    driver = Driver()
    received = busy(driver)
    drain = driver.control(Pause(mode="drain"))
    driver.control(overtaken_by)  # type: ignore[arg-type]
    driver.run()
    ended = all(one.finish_reason for one in received)
    assert ended == (overtaken_by == Pause(mode="abort"))
    assert code(driver, drain) == (200 if ended else 409)


def test_a_pause_waits_for_steps_in_flight(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    busy(driver)
    driver.publish()
    pause = driver.control(Pause(mode="in_place"))
    assert code(driver, pause) is None
    assert not driver.core.is_paused
    while driver.published:
        assert code(driver, pause) is None
        driver.answer()
        driver.deliver()
    assert code(driver, pause) == 200


def test_pauses_and_resumes_are_idempotent_and_overtake_each_other() -> None:
    driver = Driver()
    received = busy(driver)
    assert call_code(driver, Resume()) == 200
    first = driver.control(Pause(mode="drain"))
    second = driver.control(Pause(mode="in_place"))
    driver.run()
    # The drain's promise is broken, and the one that broke it is kept.
    assert (code(driver, first), code(driver, second)) == (409, 200)
    assert not any(one.finish_reason for one in received)
    assert call_code(driver, Pause(mode="in_place")) == 200
    assert [call_code(driver, Resume()) for _ in range(2)] == [200, 200]
    third = driver.control(Pause(mode="drain"))
    assert call_code(driver, Resume()) == 200
    assert code(driver, third) == 409
    driver.run()
    for one in received:
        assert_right(one)


def test_reject_while_paused() -> None:
    driver = Driver(reject_while_paused=True)
    driver.call(Pause())
    one = driver.add_and_run(prompt(1, 5))
    assert one.error is not None
    assert one.error.code == 503
    assert one.error.retry_after_s
    driver.call(Resume())
    assert_right(driver.add_and_run(prompt(1, 5), max_tokens=5))
