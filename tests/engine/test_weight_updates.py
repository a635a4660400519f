"""Weight updates: whole or not at all, and never over old keys and values."""

from __future__ import annotations

import pytest

from fastengine.protocol.control import IsPaused, Pause, Resume, Sleep, UpdateWeights, UpdateWeightsFromTensors, Wakeup, WeightsChecksum
from tests.engine.control_calls import busy, call_code, code, is_paused
from tests.engine.driver import Driver
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def test_an_update_needs_a_pause() -> None:
    driver = Driver()
    busy(driver)
    assert call_code(driver, UpdateWeights(version="v2")) == 409
    assert call_code(driver, UpdateWeightsFromTensors(path="/dev/shm/x")) == 409
    driver.run()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_never_meets_old_kv(overlap: bool, mode: str) -> None:
    driver = Driver(overlap=overlap)
    before = driver.add_and_run(prompt(5, 30), max_tokens=4)
    assert before.weight_version == "default"
    received = busy(driver)
    driver.call(Pause(mode=mode))  # type: ignore[arg-type]
    result = driver.call(UpdateWeights(model_path="/models/b", version="v2")).result
    assert result == {"weight_version": "v2", "previous_weight_version": "default"}
    assert driver.core.weight_version == "v2"
    driver.call(Resume())
    after = driver.add_and_run(prompt(5, 30), max_tokens=4)
    # The worker has checked that every position's KV is of the new weights.
    assert after.num_cached == 0
    assert after.weight_version == "v2"
    assert_right(after, driver.worker.weights)
    assert all(one.finish_reason == "length" for one in received)
    driver.assert_idle()


def test_keep_kv_goes_on_over_old_kv_and_hides_it_from_others() -> None:
    driver = Driver(enable_prefix_caching=True, num_blocks=64)
    kept = driver.add(prompt(5, 30), max_tokens=40, ignore_eos=True)
    for _ in range(6):
        driver.turn()
    driver.call(Pause(mode="in_place"))
    counts = driver.core.metrics.counters["recomputed_tokens"]
    assert call_code(driver, UpdateWeights(keep_kv=True)) == 200
    driver.worker.check_weights = False
    driver.call(Resume())
    driver.run()
    assert kept.finish_reason == "length"
    assert driver.core.metrics.counters["recomputed_tokens"] == counts
    driver.worker.check_weights = True
    again = driver.add_and_run(prompt(5, 30) + kept.tokens, max_tokens=4)
    assert again.num_cached == 0


def test_a_failed_update_changes_nothing() -> None:
    driver = Driver(tensor_parallel_size=2)
    received = busy(driver)
    driver.call(Pause(mode="in_place"))
    driver.worker.refuse["prepare_weights"] = (400, "/nonexistent/weights is not a directory")
    response = driver.call(UpdateWeights(model_path="/nonexistent/weights", version="v3"))
    assert response.error is not None
    assert response.error.code == 400
    assert "/nonexistent/weights" in response.error.message
    assert "rank 0" in response.error.message
    assert driver.core.weight_version == "default"
    assert driver.worker.prepared is None
    driver.call(Resume())
    driver.run()
    for one in received:
        assert_right(one)


def test_half_an_update_stops_everything_until_one_succeeds() -> None:
    driver = Driver()
    driver.call(Pause())
    driver.worker.refuse["commit_weights"] = (500, "out of memory")
    assert call_code(driver, UpdateWeights()) == 500
    assert call_code(driver, Resume()) == 409
    driver.worker.refuse.clear()
    assert call_code(driver, UpdateWeights()) == 200
    assert call_code(driver, Resume()) == 200


def test_updates_survive_a_crash_of_the_workers() -> None:
    driver = Driver()
    driver.call(Pause())
    driver.call(UpdateWeights(model_path="/models/b"))
    driver.call(UpdateWeightsFromTensors(path="/dev/shm/delta", version="v9"))
    expected = driver.worker.weights
    driver.call(Resume())
    received = busy(driver)
    driver.crash()
    driver.run()
    assert driver.worker.weights == expected
    for one in received:
        assert_right(one, expected)
        assert one.weight_version == "v9"


@pytest.mark.parametrize("new_weights", [UpdateWeights(model_path="/models/c"), UpdateWeightsFromTensors(path="/dev/shm/whole")])
def test_weights_that_can_not_be_restored_are_not_served(new_weights: object) -> None:
    driver = Driver()
    driver.call(Pause())
    driver.call(UpdateWeightsFromTensors(path="/dev/shm/delta"))
    driver.call(Resume())
    received = busy(driver)
    refuse = {"prepare_weights": (400, "/dev/shm/delta is gone")}
    driver.published.clear()
    driver.core.workers_lost("killed")
    driver.worker = driver.new_worker()
    driver.worker.refuse = dict(refuse)
    driver.core.workers_restarted(driver.num_blocks)
    driver.run()
    assert driver.core.is_paused
    response = driver.call(Resume())
    assert response.error is not None
    assert response.error.code == 409
    assert "/dev/shm/delta is gone" in response.error.message
    assert "/dev/shm/delta is gone" in (driver.core.fault or "")
    assert call_code(driver, WeightsChecksum()) == 409
    driver.worker.refuse.clear()
    # Tensors that are not pushed would keep values that nobody meant.
    partial = driver.call(UpdateWeightsFromTensors(path="/dev/shm/some"))
    assert partial.error is not None
    assert partial.error.code == 400
    assert "missing tensors" in partial.error.message
    assert call_code(driver, new_weights) == 200
    assert driver.core.fault is None
    assert call_code(driver, WeightsChecksum()) == 200
    assert call_code(driver, Resume()) == 200
    driver.run()
    assert all(one.finish_reason == "length" for one in received)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "drain"])
@pytest.mark.parametrize("when", ["before", "draining", "updating"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_outlives_an_update_that_stops_the_engine_itself(mode: str, when: str, fails: bool) -> None:
    driver = Driver()
    received = busy(driver)
    if fails:
        driver.worker.refuse["prepare_weights"] = (400, "no such file")
    pause = driver.control(Pause(mode=mode)) if when == "before" else None  # type: ignore[arg-type]
    update = driver.control(UpdateWeights(version="v2", stop_first="drain"))
    if when == "updating":
        while not driver.core.is_paused:
            driver.turn()
    pause = pause or driver.control(Pause(mode=mode))  # type: ignore[arg-type]
    driver.run()
    assert code(driver, update) == (400 if fails else 200)
    assert code(driver, pause) == 200
    assert is_paused(driver)
    assert call_code(driver, Resume()) == 200
    driver.run()
    assert all(one.finish_reason for one in received)
    driver.assert_idle()


@pytest.mark.parametrize("stop_first", ["drain", "abort"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_update_that_stops_the_engine_lets_it_go_on(stop_first: str, fails: bool) -> None:
    driver = Driver()
    received = busy(driver)
    if fails:
        driver.worker.refuse["prepare_weights"] = (400, "no such file")
    assert call_code(driver, UpdateWeights(version="v2", stop_first=stop_first)) == (400 if fails else 200)  # type: ignore[arg-type]
    assert not is_paused(driver)
    assert {one.finish_reason for one in received} == {"length" if stop_first == "drain" else "abort"}
    late = driver.add_and_run(prompt(8, 4), max_tokens=3)
    assert_right(late, driver.worker.weights)
    assert late.weight_version == ("default" if fails else "v2")


def test_an_update_that_can_not_stop_the_engine_in_time_changes_nothing() -> None:
    driver = Driver()
    received = busy(driver)
    update = driver.control(UpdateWeights(version="v2", stop_first="drain", timeout_s=0.01))
    for _ in range(12):
        driver.turn()
    assert code(driver, update) == 504
    assert not is_paused(driver)
    driver.run()
    for one in received:
        assert_right(one)
        assert one.weight_version == "default"


def test_a_resume_ends_an_update_that_still_waits_for_requests() -> None:
    driver = Driver()
    received = busy(driver)
    update = driver.control(UpdateWeights(version="v2", stop_first="drain"))
    assert call_code(driver, Resume()) == 200
    assert code(driver, update) == 409
    assert not is_paused(driver)
    driver.run()
    for one in received:
        assert_right(one)
        assert one.weight_version == "default"
    driver.assert_idle()


def test_what_waits_for_its_turn_too_long_is_not_done_later() -> None:
    driver = Driver()
    driver.call(Pause())
    update = driver.control(UpdateWeights(version="v2"))
    resume = driver.control(Resume())
    commands = driver.core.take_commands()
    driver.time += 9
    driver.core.expire()
    driver.deliver()
    assert (code(driver, update), code(driver, resume)) == (None, 504)
    driver.core.process_reply(driver.worker.reply(commands[-1]))
    driver.run()
    assert code(driver, update) == 200
    assert is_paused(driver)


def test_made_up_versions_are_all_different() -> None:
    driver = Driver()
    driver.call(Pause())
    made_up = [driver.call(UpdateWeights()).result["weight_version"] for _ in range(2)]
    assert driver.call(UpdateWeights(version=made_up[0])).result["weight_version"] == made_up[0]
    made_up.append(driver.call(UpdateWeights()).result["weight_version"])
    assert len(set(made_up)) == 3


def test_state_changes_during_an_update_wait_for_it_and_others_do_not() -> None:
    driver = Driver()
    driver.call(Pause())
    update = driver.control(UpdateWeights(version="v2"))
    resume = driver.control(Resume())
    second = driver.control(UpdateWeights(version="v3"))
    paused = driver.control(IsPaused())
    checksum = driver.control(WeightsChecksum())
    assert code(driver, update) is None
    assert driver.responses[paused].result == {"is_paused": True}
    driver.run()
    assert [code(driver, one) for one in (update, resume, second, checksum)] == [200, 200, 409, 200]
    assert driver.core.weight_version == "v2"


def test_an_update_that_takes_too_long_is_given_up_before_the_commit() -> None:
    driver = Driver()
    driver.call(Pause())
    update = driver.control(UpdateWeights(version="v2", timeout_s=1.0))
    (prepare,) = driver.core.take_commands()
    driver.time += 2
    driver.core.expire()
    driver.deliver()
    assert code(driver, update) == 504
    driver.core.process_reply(driver.worker.reply(prepare))
    driver.run()
    assert driver.core.weight_version == "default"
    assert driver.worker.prepared is None
    assert call_code(driver, UpdateWeights(version="v4")) == 200


def test_a_504_is_never_followed_by_the_change_it_denies() -> None:
    driver = Driver()
    driver.call(Pause())
    for command, result in (
        (UpdateWeights(version="v2", timeout_s=1.0), {"weight_version": "v2", "previous_weight_version": "default"}),
        (Sleep(timeout_s=1.0), {"sleeping": ["kv_cache", "weight"]}),
        (Wakeup(timeout_s=1.0), {"sleeping": []}),
    ):
        sent = driver.control(command)
        commands = driver.core.take_commands()
        while commands[-1].name == "prepare_weights":
            driver.core.process_reply(driver.worker.reply(commands[-1]))
            commands = driver.core.take_commands()
        driver.time += 2
        driver.core.expire()
        driver.deliver()
        assert code(driver, sent) is None
        driver.core.process_reply(driver.worker.reply(commands[-1]))
        driver.deliver()
        assert driver.responses[sent].result == result


def test_only_pushes_that_a_restart_needs_are_remembered() -> None:
    driver = Driver()
    driver.call(Pause())
    driver.call(UpdateWeightsFromTensors(path="/dev/shm/some"))
    driver.call(UpdateWeightsFromTensors(path="/dev/shm/whole"))
    driver.call(UpdateWeightsFromTensors(path="/dev/shm/more"))
    expected = driver.worker.weights
    driver.call(Resume())
    driver.published.clear()
    driver.core.workers_lost("killed")
    driver.worker = driver.new_worker()
    driver.core.workers_restarted(driver.num_blocks)
    prepared = []
    while commands := driver.core.take_commands():
        for command in commands:
            prepared += [command.args["path"]] if command.name == "prepare_weights" else []
            driver.core.process_reply(driver.worker.reply(command))
    assert prepared == ["/dev/shm/whole", "/dev/shm/more"]
    assert driver.worker.weights == expected


def test_the_checksum_is_the_one_that_every_rank_gives() -> None:
    driver = Driver(tensor_parallel_size=2)
    assert driver.call(WeightsChecksum()).result["checksum"] == "00000001"
