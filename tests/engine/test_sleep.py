"""Sleeping and waking up, in parts and through crashes."""

from __future__ import annotations

import pytest

from fastengine.protocol.control import Resume, Sleep, UpdateWeights, Wakeup
from tests.engine.control_calls import busy, call_code, is_paused
from tests.engine.driver import Driver
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


@pytest.mark.parametrize("tags", [("weight", "kv_cache"), ("kv_cache",), ("weight",)])
def test_sleep_pauses_and_wakeup_resumes(overlap: bool, tags: tuple[str, ...]) -> None:
    driver = Driver(overlap=overlap)
    received = busy(driver)
    assert driver.call(Sleep(tags=tags)).result == {"sleeping": sorted(tags)}  # type: ignore[arg-type]
    assert driver.core.is_sleeping
    assert is_paused(driver)
    assert call_code(driver, Sleep(tags=tags)) == 200  # type: ignore[arg-type]
    assert call_code(driver, Resume()) == 409
    late = driver.add_and_run(prompt(8, 4), max_tokens=3)
    assert not late.tokens
    assert driver.call(Wakeup()).result == {"sleeping": []}
    assert call_code(driver, Wakeup()) == 200
    driver.run()
    for one in [*received, late]:
        assert_right(one)


def test_waking_up_in_parts_and_updating_in_between() -> None:
    driver = Driver()
    busy(driver)
    driver.call(Sleep())
    assert call_code(driver, UpdateWeights()) == 409
    assert driver.call(Wakeup(tags=("weight",))).result == {"sleeping": ["kv_cache"]}
    assert is_paused(driver)
    assert call_code(driver, UpdateWeights(version="v2")) == 200
    driver.call(Wakeup(tags=("kv_cache",)))
    assert not is_paused(driver)
    driver.run()
    driver.assert_idle()


def test_unknown_tags_are_a_400_and_change_nothing() -> None:
    driver = Driver()
    assert call_code(driver, Sleep(tags=("unknown",))) == 400  # type: ignore[arg-type]
    assert call_code(driver, Wakeup(tags=())) == 400
    assert not is_paused(driver)


def test_a_sleep_that_fails_leaves_the_engine_running() -> None:
    driver = Driver()
    received = busy(driver)
    driver.worker.refuse["sleep"] = (500, "can't unmap")
    assert call_code(driver, Sleep()) == 500
    assert not driver.core.is_sleeping
    driver.run()
    for one in received:
        assert_right(one)


def test_a_crash_during_a_sleep_puts_nothing_to_sleep() -> None:
    driver = Driver()
    received = busy(driver)
    sleep = driver.control(Sleep())
    while driver.answer():
        pass
    assert driver.core.take_commands()[0].name == "sleep"
    driver.crash()
    error = driver.responses[sleep].error
    assert error is not None
    assert (error.code, error.message.partition("; ")[2]) == (503, "nothing was put to sleep")
    driver.run()
    assert not driver.core.is_sleeping
    for one in received:
        assert_right(one)


def test_a_crash_while_asleep_ends_asleep() -> None:
    driver = Driver()
    driver.call(Sleep())
    driver.crash()
    driver.run()
    assert driver.worker.asleep == {"weight", "kv_cache"}
    wakeup = driver.control(Wakeup())
    driver.crash()
    driver.run()
    error = driver.responses[wakeup].error
    assert error is not None
    assert (error.code, error.message.partition("; ")[2]) == (503, "still asleep: kv_cache, weight")
    assert driver.worker.asleep == {"weight", "kv_cache"}
    driver.call(Wakeup())
    assert_right(driver.add_and_run(prompt(1, 5), max_tokens=4))
