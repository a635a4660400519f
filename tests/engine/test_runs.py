"""Runs: several steps of plain decodes in one plan, and nothing that anybody could tell by their tokens."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from fastengine.engine.pipeline import UnexpectedResult
from fastengine.engine.run_length import RunLength
from fastengine.protocol.control import Pause, Resume, UpdateWeights
from fastengine.protocol.outputs import OutputBatch
from fastengine.protocol.requests import GrammarSpec, SamplingParams
from fastengine.protocol.steps import MAX_RUN_STEPS, StepPlan, StepResult
from fastengine.protocol.tokens import unpack_columns
from tests.engine.driver import MAX_MODEL_LEN, Driver, Received
from tests.engine.fake_worker import EOS, reference_output
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]

RUN_STEPS = 4
# How many steps of a run the worker answers at once.
PIECES = [[MAX_RUN_STEPS], [1], [2, 1, 3]]


def running(num_requests: int = 2, num_tokens: int = 3, run_steps: int = RUN_STEPS, **flags: Any) -> tuple[Driver, list[Received]]:
    """A driver whose ``num_requests`` requests decode in runs: how long a step of them takes has been measured."""
    driver = Driver(run_steps=run_steps, num_blocks=40, block_size=64, **flags)
    received = [driver.add(without_eos(i), max_tokens=100, ignore_eos=True) for i in range(num_requests)]
    while any(len(one.tokens) < num_tokens for one in received):
        driver.turn()
    return driver, received


def without_eos(number: int) -> list[int]:
    """One of several prompts whose first tokens of output are all plain."""
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = (prompt(seed, 6 + number) for seed in count())
    return next(one for one in prompts if EOS not in reference_output(one, sampling, MAX_MODEL_LEN)[0])


def next_plan(driver: Driver) -> StepPlan:
    """The plan that is published when those in flight are answered."""
    while driver.published:
        driver.answer()
    driver.publish()
    return driver.published[0]


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("run_steps", [2, RUN_STEPS, MAX_RUN_STEPS])
def test_requests_get_the_tokens_they_would_get_step_by_step(overlap: bool, run_steps: int, pieces: list[int]) -> None:
    driver = Driver(overlap=overlap, num_blocks=200, run_steps=run_steps)
    driver.worker.run_pieces = pieces
    received = []
    for i in range(24):
        received.append(driver.add(prompt(i % 7, 1 + (i * 13) % 60), client=i % 3, max_tokens=1 + (i * 7) % 41, ignore_eos=i % 2 == 0))
        if i % 3 == 0:
            driver.run()
    driver.run()
    for one in received:
        assert_right(one)
    driver.assert_idle()
    counters = driver.core.metrics.counters
    assert counters["num_steps"] == len(driver.worker.step_tokens)


def test_a_run_is_one_plan_and_one_message_a_client(overlap: bool) -> None:
    driver, received = running(overlap=overlap)
    other = driver.add(without_eos(9), client=1, max_tokens=50, ignore_eos=True)
    while len(other.tokens) < 3:
        driver.turn()
    plan = next_plan(driver)
    assert plan.num_steps == RUN_STEPS
    driver.deliver()
    driver.answer()
    batches = driver.core.take_outputs()
    for client, handles in ((0, [one.request.handle for one in received]), (1, [other.request.handle])):
        batch = batches[client]
        assert (batch.num_steps, batch.details) == (RUN_STEPS, [])
        assert [handle for handle, _ in unpack_columns(batch.handles, batch.token_ids, batch.num_steps)] == handles
        driver.deliver_batch(client, batch)
    driver.run()
    for one in (*received, other):
        assert_right(one)


def test_nothing_is_a_run_before_a_step_was_measured_or_when_it_is_off() -> None:
    driver = Driver(run_steps=RUN_STEPS, overlap=False, block_size=64)
    driver.add(prompt(1, 5), max_tokens=30, ignore_eos=True)
    driver.turn()
    assert next_plan(driver).num_steps == 1
    assert next_plan(driver).num_steps == RUN_STEPS
    driver, _ = running(run_steps=1)
    assert next_plan(driver).num_steps == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 40},
        {"bad_words_token_ids": ((5, 6),)},
        {"grammar": GrammarSpec("regex", "a*")},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_a_request_that_is_not_plain_makes_every_step_a_plan(sampling: dict[str, Any]) -> None:
    driver, received = running()
    special = driver.add(prompt(5, 5), max_tokens=30, ignore_eos=True, **sampling)
    while len(special.tokens) < 5:
        driver.turn()
    for _ in range(3):
        assert next_plan(driver).num_steps == 1
    driver.abort(special)
    driver.turn()
    next_plan(driver)
    assert next_plan(driver).num_steps > 1
    driver.run()
    for one in received:
        assert_right(one)


def test_a_run_ends_where_a_sequence_needs_a_block_or_ends() -> None:
    driver = Driver(run_steps=MAX_RUN_STEPS, num_blocks=100, overlap=False)
    received = driver.add(prompt(1, 6), max_tokens=24, ignore_eos=True)
    lengths = []
    while received.finish_reason is None:
        driver.publish()
        lengths += [plan.num_steps for plan in driver.published]
        driver.turn()
    # Positions 0-5 are the prompt, 6 to 28 are computed one by one, blocks of 8 begin at 8, 16 and 24, and 28 is the last.
    assert lengths == [1, 1, 1, 8, 8, 4, 1]
    assert_right(received)


def test_nothing_is_a_run_while_somebody_waits() -> None:
    driver, received = running(max_num_seqs=2)
    assert next_plan(driver).num_steps == RUN_STEPS
    waiting = driver.add(prompt(8, 5), max_tokens=3)
    assert next_plan(driver).num_steps == 1
    driver.run()
    for one in (*received, waiting):
        assert_right(one)


def test_a_stop_token_within_a_run_ends_its_row_alone() -> None:
    """Of both ways: by EOS, and by a token of the request's own."""
    alone = Driver().add_and_run(prompt(3, 6), max_tokens=30, ignore_eos=True).tokens
    for at in range(4, 12):
        if alone[at] in alone[:at]:
            continue
        driver = Driver(run_steps=RUN_STEPS)
        one = driver.add(prompt(3, 6), max_tokens=30, ignore_eos=True, stop_token_ids=(alone[at],))
        other = driver.add(prompt(4, 6), max_tokens=30, ignore_eos=True)
        driver.run()
        assert one.tokens == alone[: at + 1]
        assert_right(one)
        assert_right(other)
        driver.assert_idle()


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_an_abort_within_a_run_leaves_the_others(overlap: bool, pieces: list[int]) -> None:
    driver, received = running(3, overlap=overlap)
    driver.worker.run_pieces = pieces
    assert next_plan(driver).num_steps == RUN_STEPS
    driver.answer()
    driver.abort(received[1])
    driver.run()
    assert_right(received[0])
    assert_right(received[2])
    driver.assert_idle()


def test_a_row_that_fails_within_a_run_fails_alone() -> None:
    driver, received = running(3)
    assert next_plan(driver).num_steps == RUN_STEPS
    driver.worker.failing.add(received[1].request.request_id)
    driver.run()
    assert received[1].error is not None
    assert_right(received[0])
    assert_right(received[2])
    driver.assert_idle()


@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_ends_the_runs_in_flight(overlap: bool, mode: Any, begun: int) -> None:
    driver, received = running(overlap=overlap)
    driver.worker.run_pieces = [1]
    assert next_plan(driver).num_steps == RUN_STEPS
    for _ in range(begun):
        driver.answer()
    driver.deliver()
    before = [len(one.tokens) for one in received]
    assert driver.call(Pause(mode=mode)).result == {"is_paused": True}
    assert [len(one.tokens) for one in received] == before
    if mode == "in_place":
        driver.call(UpdateWeights(model_path=None))
    driver.call(Resume())
    driver.run()
    if mode == "retract":
        for one in received:
            assert_right(one)
    driver.assert_idle()


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_newcomer_ends_the_runs_in_flight(overlap: bool, begun: int) -> None:
    driver, received = running(overlap=overlap)
    driver.worker.run_pieces = [1]
    assert next_plan(driver).num_steps == RUN_STEPS
    for _ in range(begun):
        driver.answer()
    steps = len(driver.worker.step_tokens)
    newcomer = driver.add(prompt(8, 5), max_tokens=20, ignore_eos=True)
    while not newcomer.tokens:
        driver.turn()
    assert len(driver.worker.step_tokens) <= steps + 2 + overlap, "it waited for the runs"
    driver.run()
    for one in (*received, newcomer):
        assert_right(one)
    driver.assert_idle()


def test_a_step_that_counts_on_the_run_before_it_saves_both() -> None:
    """The second plan is the last step of a sequence: it must not come early."""
    driver = Driver(run_steps=RUN_STEPS, num_blocks=40, block_size=64)
    received = [driver.add(without_eos(i), max_tokens=3 + RUN_STEPS + i, ignore_eos=True) for i in (1, 2)]
    while [plan.num_steps for plan in driver.published] != [RUN_STEPS, 1]:
        driver.answer() if driver.published else driver.publish()
        driver.publish()
    newcomer = driver.add(prompt(8, 5), max_tokens=3)
    assert driver.core.take_cut() is None
    driver.run()
    for one in (*received, newcomer):
        assert_right(one)


def test_a_run_that_nobody_wants_any_more_is_cut() -> None:
    driver, received = running()
    assert next_plan(driver).num_steps == RUN_STEPS
    steps = len(driver.worker.step_tokens)
    driver.abort(received[0])
    assert driver.core.take_cut() is None
    driver.abort(received[1])
    driver.run()
    assert len(driver.worker.step_tokens) == steps
    driver.assert_idle()


def test_what_a_cut_run_did_not_compute_is_not_found_by_others() -> None:
    """A sequence is aborted when it knows a token that fills a block, and the run that was to compute it is cut."""
    driver = Driver(run_steps=RUN_STEPS, num_blocks=40)
    one = driver.add(without_eos(1), max_tokens=60, ignore_eos=True)
    while (len(one.request.prompt_token_ids) // 4 + len(one.tokens)) % 8 or not driver.published or driver.results:
        driver.publish()
        driver.answer()
        driver.deliver()
        driver.publish()
    history = without_eos(1) + one.tokens
    driver.abort(one)
    driver.run()
    again = driver.add([*history, 5], max_tokens=10)
    driver.run()
    assert again.num_cached == len(history) - 1
    assert_right(again)


def test_a_cut_that_nobody_asked_for_is_refused() -> None:
    driver, received = running(overlap=False)
    plan = next_plan(driver)
    cut = StepResult(step_id=plan.step_id, num_steps=0, num_cut=RUN_STEPS)
    with pytest.raises(UnexpectedResult, match="nobody had asked"):
        driver.core.process_result(cut)
    driver.abort(received[0])
    driver.add(prompt(8, 5), max_tokens=3)
    assert driver.core.take_cut() == plan.step_id + RUN_STEPS - 1
    assert driver.core.take_cut() is None, "once is enough"
    with pytest.raises(UnexpectedResult):
        driver.core.process_result(msgspec.structs.replace(cut, num_cut=RUN_STEPS - 1))
    driver.core.process_result(cut)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_crash_within_a_run_is_invisible_but_for_a_pause(overlap: bool, pieces: list[int]) -> None:
    driver, received = running(overlap=overlap)
    driver.worker.run_pieces = pieces
    for answers in range(3):
        assert next_plan(driver).num_steps == RUN_STEPS
        for _ in range(answers):
            driver.answer()
        driver.crash()
        driver.worker.run_pieces = pieces
        tokens = [len(one.tokens) for one in received]
        while [len(one.tokens) for one in received] <= [known + 3 for known in tokens]:
            driver.turn()
    driver.run()
    for one in received:
        assert_right(one)
    driver.assert_idle()


def test_a_small_pool_preempts_between_runs(overlap: bool) -> None:
    driver = Driver(num_blocks=9, run_steps=RUN_STEPS, overlap=overlap)
    received = [driver.add(prompt(i, 6), max_tokens=40, ignore_eos=True) for i in range(4)]
    driver.run()
    for one in received:
        assert_right(one)
    assert driver.core.metrics.counters["num_preemptions"]
    driver.assert_idle()


def test_a_result_that_is_not_the_runs_is_refused() -> None:
    driver, received = running(overlap=False)
    plan = next_plan(driver)
    (result,) = driver.worker.run(plan)
    for wrong in (
        msgspec.structs.replace(result, num_steps=RUN_STEPS + 1, token_ids=result.token_ids + bytes(4 * len(received))),
        msgspec.structs.replace(result, step_id=plan.step_id + 1),
        msgspec.structs.replace(result, slots=result.slots[:4], token_ids=result.token_ids[: 4 * RUN_STEPS]),
    ):
        with pytest.raises(UnexpectedResult):
            driver.core.process_result(wrong)
        assert driver.core.num_in_flight == 1, "nothing was taken off"
    for wrong in (msgspec.structs.replace(result, token_ids=result.token_ids[4:]), msgspec.structs.replace(result, num_steps=0)):
        with pytest.raises(ValueError, match="reshape"):
            driver.core.process_result(wrong)


def test_times_are_those_of_a_step() -> None:
    driver, received = running(1, overlap=False)
    histograms = driver.core.metrics.histograms
    intervals, steps = histograms["time_per_output_token_seconds"], histograms["step_time_seconds"]
    assert next_plan(driver).num_steps == RUN_STEPS
    before = [(sum(one.counts), one.total) for one in (intervals, steps)]
    driver.time += 0.04
    driver.answer()
    driver.deliver()
    for histogram, (num, total) in zip((intervals, steps), before, strict=True):
        assert sum(histogram.counts) - num == RUN_STEPS
        assert histogram.total - total == pytest.approx(0.04)
    assert driver.core.metrics.counters["generation_tokens"] == len(received[0].tokens)


def test_two_runs_that_nobody_took_are_one_message() -> None:
    driver, received = running()
    driver.deliver()
    for _ in range(2):
        assert next_plan(driver).num_steps == RUN_STEPS
    driver.answer()
    (batch,) = driver.core.take_outputs().values()
    assert isinstance(batch, OutputBatch)
    driver.deliver_batch(0, batch)
    driver.run()
    for one in received:
        assert_right(one)


# -- how long ---------------------------------------------------------------------------------


def test_a_run_is_as_long_as_its_budget_by_the_time_steps_take() -> None:
    lengths = RunLength(budget_ms=10.0, max_num_seqs=8)
    assert lengths.most_steps(1) == 1
    lengths.observe(1, num_steps=2, duration_us=5000)
    assert lengths.most_steps(1) == 4
    assert lengths.most_steps(2) == 1, "another number of sequences says nothing"
    lengths.observe(8, num_steps=1, duration_us=30_000)
    assert lengths.most_steps(8) == 1
    lengths.observe(5, num_steps=1, duration_us=6_000)
    assert lengths.most_steps(5) == 2, "12 ms is nearer than 6"
    lengths.observe(2, num_steps=1, duration_us=1)
    assert lengths.most_steps(2) == MAX_RUN_STEPS
    for _ in range(30):
        lengths.observe(1, num_steps=4, duration_us=20_000)
    assert lengths.most_steps(1) == 2


def test_one_slow_step_changes_little() -> None:
    lengths = RunLength(budget_ms=10.0, max_num_seqs=1)
    lengths.observe(1, num_steps=1, duration_us=2000)
    lengths.observe(1, num_steps=1, duration_us=4000)
    assert lengths.most_steps(1) == 4


def test_without_a_budget_every_step_is_a_plan() -> None:
    lengths = RunLength(budget_ms=0.0, max_num_seqs=1)
    lengths.observe(1, num_steps=1, duration_us=1)
    assert lengths.most_steps(1) == 1
