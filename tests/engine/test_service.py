"""The service around the core: workers that die, hang or talk nonsense, and what it leaves as evidence."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fastengine.engine.intake import IntakeFailed, IntakeThread
from fastengine.engine.launcher import WorkerGroup
from fastengine.observability.request_log import read_requests
from fastengine.protocol.control import IsPaused, Pause, Resume, UpdateWeights
from tests.engine.service_harness import PATIENCE_S, ServiceHarness, running_service
from tests.engine.test_steps import assert_right, prompt


def add_streams(service: ServiceHarness, count: int, max_tokens: int = 40) -> None:
    for i in range(count):
        service.add(prompt(i, 6 + i % 9), max_tokens=max_tokens, ignore_eos=True)


def assert_all_right(service: ServiceHarness, *but: object) -> None:
    for one in service.received.values():
        if one not in but:
            assert_right(one)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_rank_is_a_pause_under_32_streams(short_tmp: Path, num_ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    with running_service(short_tmp, tensor_parallel_size=num_ranks, max_num_seqs=32, num_gpu_blocks_override=300) as service:
        add_streams(service, 32)
        service.pump(lambda: all(len(one.tokens) >= 5 for one in service.received.values()))
        os.kill(rank_pid(service, num_ranks - 1), signal.SIGKILL)
        service.finish()
        assert_all_right(service)
        assert service.metric("worker_crashes_total") == 1
        assert service.metric("worker_recovery_seconds_count") == 1
        assert [status.state for status in service.statuses if status.state in ("recovering", "ready")] == ["ready", "recovering", "ready"]
    assert "the workers died and are started again" in caplog.text
    assert "32 running requests will be recomputed, 0 have failed" in caplog.text


def rank_pid(service: ServiceHarness, rank: int) -> int:
    group = service.service._group
    assert isinstance(group, WorkerGroup)
    return group.link.signals.get("pid", rank)


def test_a_killed_rank_is_a_pause_with_a_tiny_pool(short_tmp: Path) -> None:
    with running_service(short_tmp, num_gpu_blocks_override=9) as service:
        add_streams(service, 8)
        service.pump(lambda: sum(len(one.tokens) for one in service.received.values()) > 60)
        os.kill(rank_pid(service, 0), signal.SIGKILL)
        service.finish()
        assert_all_right(service)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_poison_request_fails_alone_after_its_second_crash(short_tmp: Path, how: str) -> None:
    with running_service(short_tmp) as service:
        add_streams(service, 6)
        bad = service.add(prompt(7, 12), request_id=f"{how}-always", max_tokens=40, ignore_eos=True)
        service.finish()
        assert bad.error is not None
        assert bad.error.code == 500
        assert "crashed twice" in bad.error.message
        assert_all_right(service, bad)
        assert service.metric("worker_crashes_total") == 2


@pytest.mark.parametrize("how", ["lie", "noise"])
def test_workers_that_talk_nonsense_are_replaced(short_tmp: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with running_service(short_tmp) as service:
        service.add(prompt(7, 12), request_id=f"{how}-once", max_tokens=20, ignore_eos=True)
        add_streams(service, 3)
        service.finish()
        assert_all_right(service)
        assert service.metric("worker_crashes_total") == 1
    assert "no longer agree" in caplog.text


def test_too_many_crashes_end_the_engine_with_the_reason(short_tmp: Path) -> None:
    with running_service(short_tmp, max_worker_restarts=0) as service:
        service.add(prompt(7, 12), request_id="raise-always", max_tokens=40)
        service.wait_state("failed")
        assert "can't compute raise-always" in service.statuses[-1].message
    assert "can't compute raise-always" in str(service.error)


def test_a_step_that_hangs_is_noticed_and_its_stacks_are_shown(
    short_tmp: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_service(short_tmp, watchdog_timeout=1.0, tensor_parallel_size=2) as service:
        service.add(prompt(7, 12), request_id="hang-once", max_tokens=20, ignore_eos=True)
        add_streams(service, 3)
        service.finish()
        assert_all_right(service)
        assert service.metric("worker_crashes_total") == 1
    assert "--watchdog-timeout" in caplog.text
    for rank in range(2):
        assert f"worker rank {rank}:\n" in caplog.text
    assert caplog.text.count("fake_ranks.py") >= 2
    assert "_workers_hang" in capfd.readouterr().err  # the engine's own threads


def test_a_command_that_hangs_is_noticed_and_answered(short_tmp: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_service(short_tmp, watchdog_timeout=1.0, tensor_parallel_size=2, crash_dump_dir=str(tmp_path)) as service:
        add_streams(service, 3)
        service.pump(lambda: all(len(one.tokens) >= 5 for one in service.received.values()))
        service.call(Pause(mode="in_place"))
        response = service.call(UpdateWeights(model_path="/hang/here"))
        assert response.error is not None
        assert response.error.code == 503
        reason = "the command prepare_weights on ranks 0, 1 has not moved for 1 s (--watchdog-timeout)"
        assert reason in response.error.message
        assert "/hang/here was not loaded, and version default is loaded again" in response.error.message
        service.wait_state("recovering")
        service.pump(lambda: service.statuses[-1].state == "ready")
        assert service.call(IsPaused()).result == {"is_paused": True}
        service.call(Resume())
        service.finish()
        assert_all_right(service)
        assert service.metric("worker_crashes_total") == 1
    assert caplog.text.count("fake_ranks.py") >= 2
    report = lines_of(*tmp_path.iterdir())
    assert (report[0]["what"], report[0]["reason"]) == ("worker", reason)
    assert "fake_ranks.py" in "".join(line["text"] for line in report if line["kind"] == "traceback")


def test_workers_that_wait_are_not_stuck(short_tmp: Path) -> None:
    with running_service(short_tmp, watchdog_timeout=0.5) as service:
        add_streams(service, 2, max_tokens=3)
        service.finish()
        with pytest.raises(AssertionError, match="recovering"):
            service.pump(lambda: any(status.state == "recovering" for status in service.statuses), "recovering", patience_s=1.5)
        assert service.metric("worker_crashes_total") == 0


# -- evidence -----------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_worker_crash_leaves_a_report(short_tmp: Path, tmp_path: Path) -> None:
    with running_service(short_tmp, crash_dump_dir=str(tmp_path), api_key="secret") as service:
        done = service.add(prompt(1, 9), request_id="done", max_tokens=3, ignore_eos=True, seed=5)
        service.finish()
        going = service.add(prompt(2, 9), request_id="going", max_tokens=100, ignore_eos=True)
        service.pump(lambda: len(going.tokens) > 5)
        service.add(prompt(3, 9), request_id="raise-once", max_tokens=4, ignore_eos=True)
        service.finish()
        assert_all_right(service)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    lines = lines_of(path)
    assert [line["kind"] for line in lines[:3]] == ["crash", "config", "traceback"]
    assert lines[0]["what"] == "worker"
    assert "can't compute raise-once" in lines[0]["reason"]
    assert lines[1]["flags"]["api_key"] == "***"
    assert "Traceback of rank 0" in lines[2]["text"]
    records = {record.request_id: record for record in read_requests(path)}
    assert list(records) == ["done", "going", "raise-once"]
    assert (records["done"].state, records["done"].finish_reason, records["done"].seed) == ("finished", "length", 5)
    assert records["done"].output_token_ids == done.tokens
    assert records["going"].state == "running"
    partial = records["going"].output_token_ids
    assert len(partial) > 5
    assert partial == going.tokens[: len(partial)]
    assert records["going"].prompt_token_ids == prompt(2, 9)


def test_a_defect_of_the_engine_leaves_a_report_and_ends_it(short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_service(short_tmp, crash_dump_dir=str(tmp_path)) as service:
        one = service.add(prompt(1, 9), max_tokens=200, ignore_eos=True)
        service.pump(lambda: len(one.tokens) > 3)

        def broken() -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(service.service._core, "schedule", broken)
        service.wait_state("failed")
        assert "a defect" in service.statuses[-1].message
    assert isinstance(service.error, ZeroDivisionError)
    (path,) = tmp_path.iterdir()
    lines = lines_of(path)
    assert lines[0]["what"] == "engine"
    assert "in broken" in lines[2]["text"]
    (record,) = read_requests(path)
    assert record.output_token_ids[:4] == one.tokens[:4]


def test_the_death_of_the_intake_thread_is_the_engines(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(IntakeThread, "_drain", broken)
    with running_service(short_tmp) as service:
        service.thread.join(30)
        assert not service.thread.is_alive()
    assert isinstance(service.error, IntakeFailed)
    assert isinstance(service.error.__cause__, ZeroDivisionError)


def test_finished_requests_are_dumped_in_batches_and_logged(short_tmp: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with running_service(short_tmp, crash_dump_dir=str(tmp_path), dump_requests=2, log_requests=True) as service:
        add_streams(service, 5, max_tokens=4)
        service.finish()
    files = sorted(tmp_path.iterdir())
    assert [len(lines_of(path)) for path in files] == [2, 2, 1]
    records = [record for path in files for record in read_requests(path)]
    assert {record.request_id: record.output_token_ids for record in records} == {
        one.request.request_id: one.tokens for one in service.received.values()
    }
    logged = [json.loads(record.getMessage().removeprefix("finished ")) for record in caplog.records if record.getMessage().startswith("finished ")]
    assert {line["request_id"] for line in logged} == {f"r{i}" for i in range(1, 6)}
    for line in logged:
        assert (line["output_tokens"], line["finish_reason"], line["client"]) == (4, "length", 0)
        assert 0 <= line["ttft_s"] <= line["e2e_s"]


def test_a_killed_launcher_is_said_in_one_line(short_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_service(short_tmp) as service:
        add_streams(service, 2)
        service.pump(lambda: all(len(one.tokens) >= 2 for one in service.received.values()))
        group = service.service._group
        assert isinstance(group, WorkerGroup)
        (group.log_dir / "launcher.log").write_text("LAUNCH INFO a banner\n" * 20)
        os.kill(group.pids()[0], signal.SIGKILL)
        service.finish()
        assert_all_right(service)
    assert "the workers died and are started again: the launcher was killed (SIGKILL)" in caplog.text
    assert "banner" not in caplog.text


def test_a_stop_does_not_wait_for_steps_that_nobody_wants(short_tmp: Path) -> None:
    """A rank that is stuck in a step must not use up the drain time when no request is left."""
    with running_service(short_tmp) as service:
        one = service.add(prompt(1, 5), request_id="hang", max_tokens=20, ignore_eos=True)
        core = service.service
        service.pump(lambda: core._core is not None and core._core.num_in_flight > 0)
        service.abort(one)
        began = time.monotonic()
        service.service.request_stop(60.0)
        service.thread.join(30)
        assert not service.thread.is_alive()
        assert time.monotonic() - began < 20


def test_nothing_is_kept_for_clients_that_have_ended(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastengine.engine.outbox.LAST_WORDS_MS", int(1500 * PATIENCE_S))
    with running_service(short_tmp) as service:
        service.wait_state("ready")
        service.hang_up()
        service.service.request_stop(0.0, nobody_reads=True)
        service.thread.join(PATIENCE_S)
        assert not service.thread.is_alive()


def test_the_status_says_why_nothing_runs(short_tmp: Path) -> None:
    with running_service(short_tmp) as service:
        service.wait_state("ready")
        core = service.service._core
        assert core is not None
        for fault, message in (("half the weights are new", "half the weights are new; update the weights"), (None, "")):
            core._operations.fault = fault
            service.call(IsPaused())
            service.pump(lambda message=message: service.statuses[-1].message == message)  # type: ignore[misc]
            assert service.statuses[-1].state == "ready"


def test_an_id_of_another_process_has_the_same_code(short_tmp: Path) -> None:
    with running_service(short_tmp) as service:
        service.wait_state("ready")
        service.call(Pause(mode="in_place"))
        first, second = (service.add([5, 6], request_id="dup", max_tokens=2) for _ in range(2))
        service.pump(lambda: second.finish_reason is not None)
        assert second.error is not None
        assert (second.error.code, second.error.reason, second.error.param) == (409, "duplicate_request_id", "request_id")
        service.call(Resume())
        service.finish()
        assert first.finish_reason != "error"
