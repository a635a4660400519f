"""Workers die: clients see a pause, a poison request ends alone."""

from __future__ import annotations

from tests.engine.driver import Driver
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def test_a_crash_is_invisible_but_for_a_pause(overlap: bool) -> None:
    driver = Driver(overlap=overlap, num_blocks=100)
    received = [driver.add(prompt(i, 12), max_tokens=30, ignore_eos=True) for i in range(12)]
    for turns in (3, 9, 17):
        for _ in range(turns):
            driver.turn()
        driver.crash()
    driver.run()
    for one in received:
        assert_right(one)
    assert driver.core.metrics.counters["worker_crashes"] == 3
    driver.assert_idle()


def test_a_poison_request_fails_alone_after_two_crashes(overlap: bool) -> None:
    driver = Driver(overlap=overlap, num_blocks=100)
    received = [driver.add(prompt(i, 12), max_tokens=30, ignore_eos=True) for i in range(6)]
    bad = driver.add(prompt(7, 12), max_tokens=30, ignore_eos=True, request_id="bad")
    for _ in range(6):
        driver.turn()
    driver.worker.poison.add("bad")
    driver.run()
    assert bad.error is not None
    assert bad.error.code == 500
    assert "crashed twice" in bad.error.message
    assert driver.core.metrics.counters["worker_crashes"] == 2
    for one in received:
        assert_right(one)
    driver.assert_idle()


def test_two_poison_requests_each_fail_alone() -> None:
    driver = Driver(num_blocks=100)
    received = [driver.add(prompt(i, 12), max_tokens=30, ignore_eos=True) for i in range(4)]
    bad = [driver.add(prompt(7 + i, 12), max_tokens=30, ignore_eos=True, request_id=f"bad{i}") for i in range(2)]
    for _ in range(6):
        driver.turn()
    driver.worker.poison |= {"bad0", "bad1"}
    driver.run()
    for one in bad:
        assert one.error is not None
        assert one.error.code == 500
    for one in received:
        assert_right(one)


def test_long_suspects_are_tried_over_several_steps_and_pools_stay_small() -> None:
    driver = Driver(num_blocks=9, max_num_batched_tokens=8)
    received = [driver.add(prompt(i, 20), max_tokens=20, ignore_eos=True) for i in range(4)]
    for _ in range(12):
        driver.turn()
    driver.crash()
    driver.run()
    for one in received:
        assert_right(one)
    driver.assert_idle()


def test_suspects_can_be_aborted_and_paused() -> None:
    from fastengine.protocol.control import Pause, Resume

    driver = Driver(num_blocks=100)
    received = [driver.add(prompt(i, 12), max_tokens=30, ignore_eos=True) for i in range(6)]
    for _ in range(6):
        driver.turn()
    driver.crash()
    driver.abort(received[0])
    driver.turn()
    driver.call(Pause(mode="retract"))
    driver.abort(received[1])
    driver.call(Resume())
    driver.run()
    for one in received[2:]:
        assert_right(one)
    driver.assert_idle()


def test_restarted_workers_with_a_smaller_pool() -> None:
    driver = Driver(num_blocks=20)
    large = driver.add(prompt(1, 60), max_tokens=60, ignore_eos=True)
    small = driver.add(prompt(2, 6), max_tokens=20, ignore_eos=True)
    for _ in range(5):
        driver.turn()
    driver.num_blocks = 8
    driver.crash()
    driver.run()
    assert large.error is not None
    assert large.error.code == 503
    assert_right(small)
    driver.assert_idle()
