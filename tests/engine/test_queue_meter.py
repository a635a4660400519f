"""Retry-After follows how fast the queue moves."""

from __future__ import annotations

import pytest

from fastengine.engine.queue_meter import HORIZON_S, MAX_RETRY_S, MIN_RETRY_S, QueueMeter
from tests.engine.driver import Driver
from tests.engine.test_steps import prompt


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def running_meter(per_s: float, seconds: float) -> tuple[QueueMeter, Clock]:
    clock = Clock()
    meter = QueueMeter(clock)
    for _ in range(int(per_s * seconds)):
        meter.started()
        clock.now += 1 / per_s
    return meter, clock


@pytest.mark.parametrize("seconds", [5, 30, 300])
def test_the_rate_is_right_soon_and_late(seconds: float) -> None:
    meter, _ = running_meter(8.0, seconds)
    assert meter.starts_per_s() == pytest.approx(8.0, rel=0.1)
    assert meter.retry_after_s(160) == pytest.approx(10.0, rel=0.1)


def test_the_estimate_is_bounded_and_needs_something_to_go_by() -> None:
    assert QueueMeter(Clock()).retry_after_s(1000) == MIN_RETRY_S
    meter, clock = running_meter(100.0, 10)
    assert meter.retry_after_s(3) == MIN_RETRY_S
    assert meter.retry_after_s(1_000_000) == MAX_RETRY_S
    clock.now += 10 * HORIZON_S
    assert meter.retry_after_s(10) == MAX_RETRY_S  # nothing has moved for long


def test_a_refused_request_is_told_how_fast_the_queue_moves() -> None:
    driver = Driver(max_num_seqs=1, max_waiting_requests=20)
    for i in range(15):
        driver.add(prompt(i, 5), max_tokens=1)
        driver.turn()
        driver.time += 2.0
    for i in range(20):
        driver.add(prompt(i, 5), max_tokens=2, ignore_eos=True)
    one = driver.add(prompt(40, 5))
    driver.deliver()
    assert one.error is not None
    assert one.error.code == 429
    # 20 wait, one starts about every two seconds, half of them are to be gone.
    assert one.error.retry_after_s == pytest.approx(20.0, rel=0.3)
    driver.run()
