"""Operators' other commands: true when answered, in any order, and never at the expense of a request."""

from __future__ import annotations

import pytest

from fastengine.protocol.control import (
    AbortRequests,
    FlushCache,
    GetMetrics,
    GetServerInfo,
    Pause,
    PrepareGrammar,
    Profile,
    Resume,
    SetLogLevel,
    UpdateWeights,
    WeightsChecksum,
)
from fastengine.protocol.requests import GrammarSpec
from tests.engine.control_calls import busy, call_code, code
from tests.engine.driver import Driver
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


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
