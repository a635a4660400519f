"""What a worker's thread reads or writes on the host, no plan overwrites meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fastengine.protocol.steps import StepPlan
from tests.engine.driver import Driver
from tests.engine.fake_worker import ints
from tests.engine.test_disk_transfers import loading, make_driver
from tests.engine.test_steps import assert_right, prompt


def saved_to(plan: StepPlan) -> set[int]:
    """Host blocks that a plan overwrites."""
    return set(np.reshape(ints(plan.swap_out), (-1, 2))[:, 1].tolist())


def run_others(driver: Driver, seeds: range) -> Iterator[StepPlan]:
    """Plans of other prompts, enough to turn the host over, while every transfer stands still."""
    for seed in seeds:
        one = driver.add(prompt(seed, 65), max_tokens=2, ignore_eos=True)
        while one.finish_reason is None:
            driver.publish()
            assert driver.published, "nothing runs while transfers stand still"
            yield driver.published[0]
            driver.answer()
            driver.deliver()
        assert_right(one)


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_that_are_written_to_files_stay(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    for seed in (1, 2, 3):
        driver.add_and_run(prompt(seed, 65), max_tokens=2, ignore_eos=True)
    overwritten: set[int] = set()
    for plan in run_others(driver, range(10, 20)):
        if driver.transfers:
            overwritten |= saved_to(plan)
    (_, store) = driver.transfers[0]
    assert store.name == "store_blocks"
    assert store.args["blocks"]
    # Everything else on the host has been given to others; these blocks only before the transfer began.
    assert overwritten
    assert len(overwritten) + len(store.args["blocks"]) >= driver.num_host_blocks
    assert not overwritten & set(store.args["blocks"])
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_that_are_read_into_stay(overlap: bool) -> None:
    driver, one = loading(overlap)
    ((_, load),) = [item for item in driver.transfers if item[1].name == "load_blocks"]
    overwritten: set[int] = set()
    for plan in run_others(driver, range(10, 20)):
        overwritten |= saved_to(plan)
    assert overwritten
    assert not overwritten & set(load.args["blocks"])
    driver.run()
    assert_right(one)
    driver.assert_idle()
