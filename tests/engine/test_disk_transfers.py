"""KV in files: found when it is there, computed again when it is not, and nobody waits for it but its request."""

from __future__ import annotations

import pytest

from fastengine.engine.request_state import RequestStatus
from fastengine.protocol.control import FlushCache, Pause, Resume, Sleep, UpdateWeights, Wakeup
from tests.engine.driver import Driver, Received
from tests.engine.test_host_tier import evict
from tests.engine.test_scheduling import counter, status
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def make_driver(**flags: object) -> Driver:
    """A device and a host so small that only files remember anything for long."""
    return Driver(**{"num_blocks": 12, "num_host_blocks": 12, "num_disk_blocks": 60, **flags})  # type: ignore[arg-type]


def stored_prompt(driver: Driver) -> None:
    """Compute prompt 1 and have its blocks in files, and nowhere else."""
    driver.add_and_run(prompt(1, 65), max_tokens=2, ignore_eos=True)
    for seed in (50, 51, 52):
        evict(driver, seed=seed)


def loading(overlap: bool, **flags: object) -> tuple[Driver, Received]:
    """A request that waits for its files, with the workers' threads still at it."""
    driver = make_driver(overlap=overlap, **flags)
    stored_prompt(driver)
    one = driver.add(prompt(1, 65), max_tokens=6, ignore_eos=True)
    driver.publish()
    assert status(driver, one) is RequestStatus.WAITING_KV
    return driver, one


def test_what_left_device_and_host_comes_back_from_files(overlap: bool) -> None:
    driver, one = loading(overlap)
    driver.run()
    assert_right(one)
    assert one.num_cached == 64
    assert counter(driver, "loaded_blocks") > 0
    driver.assert_idle()


def test_others_run_while_files_are_read(overlap: bool) -> None:
    driver, one = loading(overlap)
    other = driver.add(prompt(7, 9), max_tokens=9, ignore_eos=True)
    for _ in range(20):
        driver.publish()
        driver.answer()
        driver.deliver()
    assert_right(other)
    assert status(driver, one) is RequestStatus.WAITING_KV
    driver.run()
    assert_right(one)


def test_files_that_can_not_be_read_are_computed_again(overlap: bool) -> None:
    driver, one = loading(overlap)
    driver.worker.disk_is_broken = True
    driver.run()
    assert_right(one)
    assert counter(driver, "storage_failures") > 0
    driver.worker.disk_is_broken = False
    driver, one = loading(overlap)
    missing = list(driver.disk)[::2]
    for key in missing:
        del driver.disk[key]
    driver.run()
    assert_right(one)
    driver.assert_idle()


def test_a_rank_that_fails_fails_the_block() -> None:
    driver, one = loading(True, tensor_parallel_size=2)
    driver.worker.refuse["load_blocks"] = (500, "I/O error")
    driver.run()
    assert_right(one)
    assert counter(driver, "loaded_blocks") == 0


def test_a_disk_that_can_not_be_written_costs_nothing_but_its_use() -> None:
    driver = make_driver()
    driver.worker.disk_is_broken = True
    stored_prompt(driver)
    assert_right(driver.add_and_run(prompt(1, 65), max_tokens=6, ignore_eos=True))
    assert driver.disk == {}
    assert driver.core.server_info()["gauges"]["disk_cache_block_num"] == 0
    driver.assert_idle()


def test_the_disk_is_bounded_and_its_files_are_those_that_are_known() -> None:
    driver = make_driver(num_disk_blocks=5)
    for seed in range(12):
        driver.add_and_run(prompt(seed, 60), max_tokens=4, ignore_eos=True)
    assert 0 < len(driver.disk) <= 5  # the fake worker checks the bound at every write
    assert driver.core.server_info()["gauges"]["disk_cache_block_num"] <= 5
    driver.call(FlushCache())
    driver.run()
    assert driver.disk == {}


@pytest.mark.parametrize("reply_first", [True, False])
def test_abort_while_files_are_read(overlap: bool, reply_first: bool) -> None:
    driver, one = loading(overlap)
    if reply_first:
        driver.finish_transfers()
    driver.abort(one)
    driver.run()
    driver.assert_idle()
    assert_right(driver.add_and_run(prompt(1, 65), max_tokens=6, ignore_eos=True))


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place"])
def test_pausing_while_files_are_read(overlap: bool, mode: str) -> None:
    driver, one = loading(overlap)
    driver.call(Pause(mode=mode))  # type: ignore[arg-type]
    driver.call(Resume())
    driver.run()
    assert_right(one)
    driver.assert_idle()


def test_whatever_empties_the_cache_forgets_the_files(overlap: bool) -> None:
    driver, one = loading(overlap)
    driver.call(FlushCache())
    driver.run()
    assert_right(one)
    assert one.num_cached == 0
    driver, one = loading(overlap)
    driver.call(Sleep())
    driver.call(Wakeup())
    driver.run()
    assert_right(one)
    driver, one = loading(overlap)
    driver.call(Pause(mode="in_place"))
    driver.call(UpdateWeights(model_path="/models/b"))
    weights = driver.worker.weights
    driver.call(Resume())
    driver.run()
    assert_right(one, weights)
    driver.assert_idle()


def test_files_outlive_a_crash_of_the_workers(overlap: bool) -> None:
    driver, one = loading(overlap)
    driver.crash()
    driver.run()
    assert_right(one)
    assert one.num_cached  # what was still on the device or the host only is gone
    assert counter(driver, "loaded_blocks") > 0
    driver.assert_idle()


def test_a_flush_while_blocks_are_written_removes_what_was_written() -> None:
    driver = make_driver()
    driver.add_and_run(prompt(1, 65), max_tokens=2, ignore_eos=True)
    driver.add(prompt(50, 80), max_tokens=2, ignore_eos=True)
    while not driver.transfers:
        driver.publish()
        driver.answer()
        driver.deliver()
    driver.call(FlushCache())
    driver.run()
    assert not [key for key in driver.disk if key not in driver.core._resources.transfers.disk]


def test_files_that_a_dying_worker_should_have_removed_are_removed_by_its_successor() -> None:
    driver = make_driver()
    stored_prompt(driver)
    assert driver.disk
    driver.call(FlushCache())
    driver.publish()
    assert driver.transfers
    driver.crash()
    driver.run()
    assert driver.disk == {}


def test_files_need_the_host_tier() -> None:
    with pytest.raises(ValueError, match="on the host"):
        Driver(num_disk_blocks=5)
