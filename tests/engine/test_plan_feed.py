"""Messages reach the workers in order whatever the ring has room for, and only steps in flight can be stuck."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fastengine.engine import plan_feed
from fastengine.engine.launcher import first_generation
from fastengine.engine.plan_feed import PlanFeed
from fastengine.ipc.worker_link import MIN_RING_BYTES, EngineEnd, WorkerEnd, generation_dir
from fastengine.protocol.steps import StepPlan, ToWorker, WorkerCommand


@pytest.fixture
def link(short_tmp: Path) -> EngineEnd:
    return EngineEnd(short_tmp, 0, 1)


def test_what_the_ring_has_no_room_for_waits_and_keeps_its_order(short_tmp: Path, link: EngineEnd) -> None:
    worker = WorkerEnd(short_tmp, 0, 0, 1)
    feed = PlanFeed(link, 0.0)
    large = bytes(MIN_RING_BYTES // 3)
    for step in range(6):
        feed.send(StepPlan(step_id=step, decodes=large))
    feed.send(WorkerCommand(command_id=1, name="ping"))
    assert feed.has_backlog
    received: list[object] = []
    decode = msgspec.msgpack.Decoder(ToWorker).decode
    while feed.has_backlog or len(received) < 7:
        message = worker.receive(0)
        assert message is not None
        received.append(decode(message))
        feed.flush()
    assert [message.step_id for message in received[:6] if isinstance(message, StepPlan)] == list(range(6))
    assert isinstance(received[6], WorkerCommand)


def test_only_steps_in_flight_that_do_not_move_are_stuck(link: EngineEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(plan_feed.time, "monotonic", lambda: now)
    feed = PlanFeed(link, 5.0)
    assert feed.stuck_at() is None
    feed.send(WorkerCommand(command_id=1, name="load_weights"))
    assert feed.stuck_at() is None  # commands have time limits of their own
    feed.send(StepPlan(step_id=1))
    now = 103.0
    feed.send(StepPlan(step_id=2))
    assert feed.stuck_at() == 105.0
    feed.answered()
    assert feed.stuck_at() == 108.0  # the second began to run only now
    feed.answered()
    assert feed.stuck_at() is None
    assert PlanFeed(link, 0.0).stuck_at() is None


def test_a_rank_that_no_longer_listens_is_remembered_and_told_once(short_tmp: Path, link: EngineEnd, caplog: pytest.LogCaptureFixture) -> None:
    feed = PlanFeed(link, 0.0)
    for step in range(3):
        feed.send(StepPlan(step_id=step))
    assert feed.has_lost_rank
    assert caplog.text.count("no longer listens") == 1


def test_an_engine_started_again_takes_new_numbers_and_removes_what_the_dead_one_left(short_tmp: Path) -> None:
    assert first_generation(short_tmp) == 0
    for generation in (0, 1, 9, 10):
        EngineEnd(short_tmp, generation, 1)
    assert first_generation(short_tmp) == 11
    assert not generation_dir(short_tmp, 10).exists()
