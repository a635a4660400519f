"""A waiter looks for a moment only when the wait before was a short one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fastengine.ipc import spin
from fastengine.ipc.spin import Spinner
from fastengine.ipc.worker_link import EngineEnd, WorkerEnd


class Clock:
    """Each look at it costs ``step_s``."""

    def __init__(self, step_s: float):
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(10e-6)
    monkeypatch.setattr(spin.time, "perf_counter", clock)
    return clock


def test_a_look_that_finds_is_over_at_once(clock: Clock) -> None:
    answers = iter([None, None, b"found"])
    assert Spinner().look(lambda: next(answers)) == b"found"


def test_a_look_in_vain_ends_in_time_and_long_waits_stop_looking_until_a_short_one(clock: Clock) -> None:
    spinner = Spinner()
    looks: list[None] = []
    assert spinner.look(lambda: looks.append(None)) is None
    assert 0 < len(looks) <= spin.SPIN_S / clock.step_s
    clock.now += 0.01
    spinner.woken()
    looks.clear()
    for _ in range(3):
        assert spinner.look(lambda: looks.append(None)) is None
        clock.now += 0.01
        spinner.woken()
    assert not looks
    assert spinner.look(lambda: looks.append(None)) is None
    spinner.woken()  # at once: the next wait is worth a look
    spinner.look(lambda: looks.append(None))
    assert looks


def test_rings_left_over_from_messages_found_by_looking_wake_nobody_for_nothing(short_tmp: Path) -> None:
    engine = EngineEnd(short_tmp, 0, 1)
    worker = WorkerEnd(short_tmp, 0, 0, 1)
    for i in range(5):
        engine.publish(b"%d" % i)
    assert [worker.receive(0) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    started = time.monotonic()
    assert worker.receive(0.1) is None
    assert time.monotonic() - started >= 0.1
    worker.close()
    engine.close()
