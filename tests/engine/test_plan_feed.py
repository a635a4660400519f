"""Messages reach the workers in order whatever the ring has room for, and only what has work can be stuck."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fastengine.engine import command_watch, plan_feed
from fastengine.engine.launcher import first_generation
from fastengine.engine.plan_feed import PlanFeed
from fastengine.ipc.worker_link import MIN_RING_BYTES, EngineEnd, WorkerEnd, generation_dir
from fastengine.protocol.steps import StepPlan, ToWorker, WorkerCommand, WorkerReply


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


class Clock:
    """Stands for the time module in what is tested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        for module in (plan_feed, command_watch):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_only_steps_in_flight_that_do_not_move_are_stuck(link: EngineEnd, clock: Clock) -> None:
    feed = PlanFeed(link, 5.0)
    assert feed.stuck_at() is None
    feed.send(StepPlan(step_id=1))
    clock.now = 103.0
    feed.send(StepPlan(step_id=2))
    assert feed.stuck_at() == 105.0
    feed.answered()
    assert feed.stuck_at() == 108.0  # the second began to run only now
    feed.answered()
    assert feed.stuck_at() is None
    assert PlanFeed(link, 0.0).stuck_at() is None


def moves(link: EngineEnd, rank: int, clock: Clock, command_id: int) -> None:
    link.signals.set("last_command_id", rank, command_id)
    link.signals.set("command_moved_ns", rank, int(clock.now * 1e9))


def test_a_command_that_moves_may_take_as_long_as_it_likes(short_tmp: Path, clock: Clock) -> None:
    link = EngineEnd(short_tmp, 0, 2)
    feed = PlanFeed(link, 5.0)
    feed.send(WorkerCommand(command_id=1, name="commit_weights"))
    assert feed.standstill() == (100.0, "the command commit_weights on ranks 0, 1")
    for _ in range(10):
        clock.now += 4.0
        moves(link, 1, clock, 1)  # rank 0 waits for it
        assert feed.stuck_at() == clock.now + 5.0
    feed.send(StepPlan(step_id=1))  # lies behind the command
    clock.now += 4.0
    moves(link, 0, clock, 1)
    feed.replied(WorkerReply(command_id=1, rank=1))
    assert feed.standstill() == (clock.now, "the command commit_weights on rank 0")
    clock.now += 4.0
    feed.replied(WorkerReply(command_id=1, rank=0))
    assert feed.standstill() == (clock.now, "a step")
    feed.answered()
    assert feed.stuck_at() is None
    assert PlanFeed(link, 0.0).stuck_at() is None


def test_a_rank_that_answers_does_not_hide_one_that_hangs(short_tmp: Path, clock: Clock) -> None:
    link = EngineEnd(short_tmp, 0, 2)
    feed = PlanFeed(link, 5.0)
    for command_id in range(1, 6):
        feed.send(WorkerCommand(command_id=command_id, name="checksum"))
        moves(link, 0, clock, command_id)
        feed.replied(WorkerReply(command_id=command_id, rank=0))
        clock.now += 1.0
    assert feed.standstill() == (100.0, "the command checksum on rank 1")


def test_what_a_rank_does_beside_its_steps_must_only_be_taken_up(link: EngineEnd, clock: Clock) -> None:
    feed = PlanFeed(link, 5.0)
    feed.send(WorkerCommand(command_id=7, name="compile_grammar"))
    assert feed.stuck_at() == 105.0
    clock.now = 104.0
    moves(link, 0, clock, 7)
    assert feed.stuck_at() is None
    feed.send(StepPlan(step_id=1))
    clock.now = 106.0
    feed.replied(WorkerReply(command_id=7, rank=0))
    assert feed.stuck_at() == 109.0  # its answer says nothing of the step


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
