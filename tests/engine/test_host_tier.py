"""Requests whose KV went down to the host: it comes back right, in bounds, and holds up nobody."""

from __future__ import annotations

import pytest

from fastengine.engine.request_state import RequestStatus
from fastengine.protocol.control import FlushCache, Pause, Resume, Sleep, UpdateWeights, Wakeup
from tests.engine.driver import Driver, Received
from tests.engine.test_scheduling import counter, status
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def evict(driver: Driver, *, seed: int = 50) -> None:
    """Fill the device pool with something else."""
    received = driver.add_and_run(prompt(seed, driver.num_blocks * 8 - 16), max_tokens=2)
    assert received.error is None


def test_a_conversation_that_was_evicted_is_not_computed_again(overlap: bool) -> None:
    driver = Driver(num_blocks=12, num_host_blocks=40, overlap=overlap)
    first = driver.add_and_run(prompt(1, 41), max_tokens=10, ignore_eos=True)
    evict(driver)
    history = prompt(1, 41) + first.tokens + [5]
    again = driver.add_and_run(history, max_tokens=4, ignore_eos=True)
    assert again.num_cached == 48
    assert_right(again)
    assert counter(driver, "swapped_in_blocks") > 0
    assert counter(driver, "prefix_cache_host_hits") == 8 * counter(driver, "swapped_in_blocks")
    driver.assert_idle()


def restoring(overlap: bool, **flags: object) -> tuple[Driver, Received]:
    """A driver, and a request in WAITING_KV whose ten blocks come back two a step."""
    driver = Driver(num_blocks=14, num_host_blocks=40, max_swaps=2, overlap=overlap, max_num_batched_tokens=8, **flags)
    driver.add_and_run(prompt(1, 81), max_tokens=2, ignore_eos=True)
    for i in range(8):
        driver.add_and_run(prompt(30 + i, 15), max_tokens=2, ignore_eos=True)  # two blocks each
    one = driver.add(prompt(1, 81), max_tokens=6, ignore_eos=True)
    driver.turn()
    assert status(driver, one) is RequestStatus.WAITING_KV
    return driver, one


def test_what_is_more_than_one_step_may_copy_comes_in_piecemeal(overlap: bool) -> None:
    driver, one = restoring(overlap)
    driver.run()
    assert_right(one)
    assert one.num_cached == 80
    driver.assert_idle()


def test_others_run_while_a_request_is_restored(overlap: bool) -> None:
    driver, one = restoring(overlap)
    other = driver.add(prompt(7, 3), max_tokens=3, ignore_eos=True)
    while not other.finish_reason:
        driver.turn()
    assert not one.tokens
    driver.run()
    assert_right(one)
    assert_right(other)


def test_decoding_takes_the_blocks_of_a_restore(overlap: bool) -> None:
    driver, one = restoring(overlap)
    other = driver.add(prompt(7, 3), max_tokens=60, ignore_eos=True)
    driver.run()
    assert_right(one)
    assert_right(other)
    driver.assert_idle()


@pytest.mark.parametrize("turns", range(6))
def test_abort_while_restoring(overlap: bool, turns: int) -> None:
    driver, one = restoring(overlap)
    for _ in range(turns):
        driver.turn()
    driver.abort(one)
    driver.run()
    driver.assert_idle()
    again = driver.add_and_run(prompt(1, 81), max_tokens=6, ignore_eos=True)
    assert_right(again)


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place"])
def test_pausing_while_restoring(overlap: bool, mode: str) -> None:
    driver, one = restoring(overlap)
    driver.call(Pause(mode=mode))  # type: ignore[arg-type]
    driver.call(Resume())
    driver.run()
    assert_right(one)
    driver.assert_idle()


def test_whatever_empties_the_cache_ends_a_restore(overlap: bool) -> None:
    driver, one = restoring(overlap)
    driver.call(FlushCache())
    driver.run()
    assert_right(one)
    assert one.num_cached == 0
    driver, one = restoring(overlap)
    driver.call(Sleep())
    driver.call(Wakeup())
    driver.run()
    assert_right(one)
    driver, one = restoring(overlap)
    driver.crash()
    driver.run()
    assert_right(one)
    driver.assert_idle()


def test_kv_of_old_weights_does_not_come_back() -> None:
    driver, one = restoring(overlap=True)
    driver.call(Pause(mode="in_place"))
    driver.call(UpdateWeights(model_path="/models/b", keep_kv=True))
    weights = driver.worker.weights
    driver.call(Resume())
    driver.run()
    assert_right(one, weights)
    assert one.num_cached == 0


def test_no_step_copies_more_than_its_bound() -> None:
    driver = Driver(num_blocks=20, num_host_blocks=80, max_swaps=9, max_num_batched_tokens=128)
    for round_ in range(3):
        for i in range(6):
            driver.add(prompt(i, 98), max_tokens=5, ignore_eos=True)
        driver.run()
        for one in driver.received.values():
            assert_right(one)
        assert round_ == 0 or counter(driver, "swapped_in_blocks") > 0
    assert max(driver.worker.step_swaps) == 9
    driver.assert_idle()


def test_preempted_requests_find_their_kv_on_the_host(overlap: bool) -> None:
    driver = Driver(num_blocks=12, num_host_blocks=60, overlap=overlap)
    received = [driver.add(prompt(i, 30), max_tokens=40, ignore_eos=True) for i in range(4)]
    driver.run()
    for one in received:
        assert_right(one)
    assert counter(driver, "num_preemptions") > 0
    assert counter(driver, "swapped_in_blocks") > 0
    # Computed again is less than what the preempted had computed.
    assert counter(driver, "recomputed_tokens") < 30 * counter(driver, "num_preemptions")


def test_host_gauges() -> None:
    driver = Driver(num_blocks=12, num_host_blocks=40)
    driver.add_and_run(prompt(1, 41), max_tokens=2)
    evict(driver)
    gauges = driver.core.server_info()["gauges"]
    assert gauges["max_cpu_block_num"] == 40
    assert gauges["available_cpu_block_num"] == 40 - len(driver.core._resources.kv.host) < 40
    assert 0 < gauges["cpu_cache_usage_perc"] < 1
