"""What a step of decodes costs: the same work whatever the sequences' length. Counted in executed lines, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import pytest

from fastengine.ipc.channels import ENCODER
from fastengine.protocol.steps import StepResult
from fastengine.protocol.tokens import pack_token_ids
from tests.engine.driver import Driver
from tests.engine.fake_worker import EOS
from tests.engine.test_steps import prompt

T = TypeVar("T")
RUNNING, BLOCK_SIZE = 8, 16
PLAIN = EOS + 1
NUM_STEPS = 4 * BLOCK_SIZE


def lines_executed(call: Callable[[], T]) -> tuple[T, int]:
    """What ``call`` returns, and how many lines of the project it executes: a loop's body counts at every turn."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("fastengine."):
            return None  # a test tool's hook into the collector, say
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, count


def decoding(context: int, num_host_blocks: int) -> Driver:
    """RUNNING sequences of about ``context`` tokens that decode. Lengths differ: most steps complete a block."""
    driver = Driver(
        num_blocks=RUNNING * (context // BLOCK_SIZE + NUM_STEPS),
        max_model_len=context + 4 * NUM_STEPS,
        num_host_blocks=num_host_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=RUNNING * context,
        check_invariants=False,  # they look at everything
    )
    for i in range(RUNNING):
        received = driver.add(prompt(i, context - 2 * i), max_tokens=3 * NUM_STEPS, ignore_eos=True)
        while not received.tokens:
            driver.turn()
    return driver


def cost(driver: Driver) -> list[tuple[int, int]]:
    """(lines executed, bytes for the workers) of each of NUM_STEPS steps."""
    costs = []
    for _ in range(NUM_STEPS):
        plan, scheduling = lines_executed(driver.core.schedule)
        assert plan is not None
        # One plain token for each: what is sampled makes a difference, too.
        driver.published.append(plan)
        running = driver.published.popleft()
        slots = running.decodes + running.chunk_slots
        result = StepResult(step_id=running.step_id, slots=slots, token_ids=pack_token_ids([PLAIN] * (len(slots) // 4)))
        _, processing = lines_executed(lambda result=result: driver.core.process_result(result))
        driver.deliver()
        sizes = [len(value) for value in (plan.decodes, plan.chunk_slots, plan.grown_slots, plan.grown_blocks)]
        costs.append((scheduling + processing, sum(sizes)))
        assert len(ENCODER.encode(plan)) < 1024
    return costs


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["no host tier", "host tier"])
def test_a_step_does_no_more_for_longer_sequences(num_host_blocks: int) -> None:
    short = cost(decoding(4 * BLOCK_SIZE, num_host_blocks))
    assert cost(decoding(128 * BLOCK_SIZE, num_host_blocks)) == short
    assert min(num_lines for num_lines, _ in short) > 50
    assert sum(num_bytes for _, num_bytes in short) > 0
