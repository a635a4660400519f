"""Operators' commands: true when answered, in any order, and never at the expense of a request."""

from __future__ import annotations

import pytest

from fastengine.protocol.control import (
    AbortRequests,
    FlushCache,
    GetMetrics,
    GetServerInfo,
    IsPaused,
    Pause,
    PrepareGrammar,
    Profile,
    Resume,
    SetLogLevel,
    Sleep,
    UpdateWeights,
    UpdateWeightsFromTensors,
    Wakeup,
    WeightsChecksum,
)
from fastengine.protocol.requests import GrammarSpec
from tests.engine.driver import Driver, Received
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def busy(driver: Driver, count: int = 4, turns: int = 5, max_tokens: int = 40) -> list[Received]:
    received = [driver.add(prompt(i, 10), max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
    for _ in range(turns):
        driver.turn()
    return received


def code(driver: Driver, request_id: str) -> int | None:
    response = driver.responses.get(request_id)
    return None if response is None else 200 if response.error is None else response.error.code


def call_code(driver: Driver, command: object) -> int:
    response = driver.call(command)  # type: ignore[arg-type]
    return 200 if response.error is None else response.error.code


def is_paused(driver: Driver) -> bool:
    return driver.call(IsPaused()).result["is_paused"]


# -- pause and resume -------------------------------------------------------------------------------


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


# -- abort ------------------------------------------------------------------------------------------


def test_abort_by_exact_id_parent_and_all() -> None:
    driver = Driver(max_num_seqs=3)
    child = [driver.add(prompt(1, 20), request_id=f"p-{i}", parent_id="p", max_tokens=50, ignore_eos=True) for i in range(2)]
    one, waiting, last = (driver.add(prompt(i, 9), request_id=f"id{i}", max_tokens=50, ignore_eos=True) for i in (1, 10, 2))
    for _ in range(8):
        driver.turn()
    result = driver.call(AbortRequests(req_ids=("id1", "id", "p", "id10", "id1"))).result
    assert [entry["request_id"] for entry in result["aborted"]] == ["id1", "p", "id10"]
    assert result["not_found"] == ["id"]
    by_id = {entry["request_id"]: entry for entry in result["aborted"]}
    assert by_id["id1"]["num_output_tokens"] == len(one.tokens) > 0
    assert by_id["id10"]["num_output_tokens"] == 0
    assert {entry["request_id"]: entry["num_output_tokens"] for entry in by_id["p"]["children"]} == {
        f"p-{i}": len(c.tokens) for i, c in enumerate(child)
    }
    assert {c.finish_reason for c in [*child, one, waiting]} == {"abort"}
    assert last.finish_reason is None
    assert driver.call(AbortRequests(abort_all=True)).result["aborted"] == [{"request_id": "id2", "num_output_tokens": len(last.tokens)}]
    assert driver.call(AbortRequests(abort_all=True)).result == {"aborted": [], "not_found": []}
    assert call_code(driver, AbortRequests()) == 400
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("names", [("p", "p#0"), ("p#0", "p"), ("p#1", "p#0", "p", "x")], ids=str)
def test_a_list_may_hold_a_parent_and_its_children(names: tuple[str, ...]) -> None:
    driver = Driver()
    children = [driver.add(prompt(1, 20), request_id=f"p#{i}", parent_id="p", max_tokens=50, ignore_eos=True) for i in range(2)]
    for _ in range(8):
        driver.turn()
    result = driver.call(AbortRequests(req_ids=names)).result
    assert [entry["request_id"] for entry in result["aborted"]] == [name for name in names if name != "x"]
    assert result["not_found"] == [name for name in names if name == "x"]
    counts = {f"p#{i}": len(child.tokens) for i, child in enumerate(children)}
    for entry in result["aborted"]:
        assert entry["num_output_tokens"] == (sum(counts.values()) if entry["request_id"] == "p" else counts[entry["request_id"]]) > 0
    assert {child.finish_reason for child in children} == {"abort"}
    driver.run()
    driver.assert_idle()


# -- weights ----------------------------------------------------------------------------------------


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


# -- sleep ------------------------------------------------------------------------------------------


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


# -- the rest ---------------------------------------------------------------------------------------


def test_flush_cache_forgets_everything(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    driver.add_and_run(prompt(1, 30), max_tokens=2)
    received = busy(driver, count=2)
    assert driver.call(FlushCache()).result["num_flushed_blocks"] >= 3
    one = driver.add_and_run(prompt(1, 30), max_tokens=2)
    assert one.num_cached == 0
    for kept in received:
        assert_right(kept)
    driver.assert_idle()


def test_tools_reach_every_rank_while_steps_run() -> None:
    driver = Driver(tensor_parallel_size=2)
    received = busy(driver)
    grammar = PrepareGrammar(GrammarSpec("regex", "a+"))
    ids = [driver.control(command) for command in (Profile(action="start"), SetLogLevel(level="INFO"), WeightsChecksum(), grammar)]
    driver.run()
    assert [code(driver, one) for one in ids] == [200, 200, 200, 200]
    for one in received:
        assert_right(one)


def test_a_log_level_outlives_the_workers() -> None:
    driver = Driver()
    assert driver.core.log_level is None
    driver.call(SetLogLevel(level="DEBUG"))
    assert driver.core.log_level == "DEBUG"
    driver.crash()
    driver.run()
    assert driver.worker.log_level == "DEBUG"


def test_workers_that_die_fail_outstanding_commands() -> None:
    driver = Driver()
    driver.call(Pause())
    update = driver.control(UpdateWeights(model_path="/models/cut-short"))
    checksum = driver.control(WeightsChecksum())
    driver.core.workers_lost("killed")
    driver.deliver()
    assert (code(driver, update), code(driver, checksum)) == (503, 503)
    error = driver.responses[update].error
    assert error is not None
    lost = "the workers were lost (killed) and are being started again"
    assert error.message == f"{lost}; /models/cut-short was not loaded, and version default is loaded again"
    assert driver.core.weight_version == "default"
    while_down = driver.control(WeightsChecksum())
    assert code(driver, while_down) == 503
    driver.core.workers_restarted(driver.num_blocks)
    assert call_code(driver, Resume()) == 200


def test_a_pause_is_complete_when_the_workers_die() -> None:
    driver = Driver()
    received = busy(driver)
    driver.publish()
    pause = driver.control(Pause(mode="in_place"))
    driver.crash()
    driver.deliver()
    assert code(driver, pause) == 200
    driver.call(Resume())
    driver.run()
    for one in received:
        assert_right(one)


def test_server_info_and_metrics() -> None:
    driver = Driver(served_model_name="tiny", api_key="secret")
    busy(driver, count=3, turns=50)
    info = driver.call(GetServerInfo()).result
    assert info["config"]["max_num_seqs"] == 8
    assert "secret" not in str(info)
    text = driver.call(GetMetrics()).result["text"]
    for line in (
        'fastengine:num_requests_running{model_name="tiny"} 0.0',
        'fastengine:request_success_total{finish_reason="length",model_name="tiny"} 3.0',
        'fastengine:generation_tokens_total{model_name="tiny"} 120.0',
        'fastengine:available_gpu_block_num{model_name="tiny"} 32.0',
        'fastengine:time_per_output_token_seconds_count{model_name="tiny"} 117.0',
        'fastengine:e2e_request_latency_seconds_bucket{finish_reason="length",le="600.0",model_name="tiny"} 3.0',
    ):
        assert line in text
