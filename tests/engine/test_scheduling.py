"""Who runs when: preemption, fairness, priorities, shared prefixes, budgets."""

from __future__ import annotations

import pytest

from fastengine.engine.admitter import MAX_BYPASSES, MAX_STARTED_BYTES
from fastengine.engine.request_state import RequestStatus
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.worker_link import MIN_RING_BYTES
from fastengine.protocol.control import Pause, Resume
from fastengine.protocol.requests import GrammarSpec
from tests.engine.driver import Driver, Received
from tests.engine.fake_worker import ints
from tests.engine.test_steps import assert_right, overlap, prompt

__all__ = ["overlap"]


def status(driver: Driver, received: Received) -> RequestStatus:
    (state,) = driver.core._table.named(received.request.request_id)
    return state.status


def counter(driver: Driver, name: str) -> int:
    return driver.core.metrics.counters[name]


@pytest.mark.parametrize("num_blocks", [4, 6, 9])
def test_a_pool_too_small_for_all_preempts_and_loses_nothing(overlap: bool, num_blocks: int) -> None:
    driver = Driver(num_blocks=num_blocks, overlap=overlap)
    received = [driver.add(prompt(i, 6), max_tokens=20, ignore_eos=True) for i in range(6)]
    driver.run()
    for one in received:
        assert_right(one)
    assert counter(driver, "num_preemptions") > 0
    driver.assert_idle()


def test_the_latest_is_preempted_and_resumes_before_others_start(overlap: bool) -> None:
    driver = Driver(num_blocks=6, overlap=overlap, enable_prefix_caching=False)
    first = driver.add(prompt(1, 15), max_tokens=25, ignore_eos=True)
    second = driver.add(prompt(2, 15), max_tokens=25, ignore_eos=True)
    for _ in range(3):
        driver.turn()
    third = driver.add(prompt(3, 15), max_tokens=2, ignore_eos=True)
    order: list[Received] = []
    for _ in range(200):
        driver.turn()
        order += [one for one in (first, second, third) if one.finish_reason and one not in order]
    assert counter(driver, "num_preemptions") >= 1
    assert order.index(first) < order.index(second)
    for one in (first, second, third):
        assert_right(one)


def test_a_long_prompt_does_not_starve_short_ones(overlap: bool) -> None:
    driver = Driver(num_blocks=200, overlap=overlap, max_num_batched_tokens=32, long_prefill_token_threshold=16, max_num_partial_prefills=2)
    longs = [driver.add(prompt(i, 250), max_tokens=2, ignore_eos=True) for i in range(4)]
    for _ in range(4):
        driver.turn()
    short = driver.add(prompt(9, 6), max_tokens=2, ignore_eos=True)
    for _ in range(8):
        driver.turn()
    assert short.finish_reason == "length"
    assert not any(one.finish_reason for one in longs)
    driver.run()
    for one in [*longs, short]:
        assert_right(one)


def test_small_requests_pass_a_large_one_but_not_for_ever() -> None:
    driver = Driver(num_blocks=10, overlap=False, enable_prefix_caching=False, max_num_seqs=4)
    running = driver.add(prompt(1, 30), max_tokens=40, ignore_eos=True)
    driver.turn()
    large = driver.add(prompt(2, 60), max_tokens=2, ignore_eos=True)
    driver.turn()
    small = driver.add(prompt(3, 5), max_tokens=2, ignore_eos=True)
    for _ in range(4):
        driver.turn()
    assert small.finish_reason == "length"  # it passed
    assert status(driver, large) is RequestStatus.WAITING
    # Small ones keep coming: the large one must still get its turn, and before all of them are through.
    driver.run()
    assert_right(running)
    assert_right(large)
    blocker = driver.add(prompt(4, 30), max_tokens=2, ignore_eos=True)
    smalls: list[Received] = [driver.add(prompt(5, 20), max_tokens=60, ignore_eos=True) for _ in range(2)]
    driver.turn()
    large = driver.add(prompt(2, 60), max_tokens=2, ignore_eos=True)
    for i in range(2000):
        if large.finish_reason:
            break
        smalls.append(driver.add(prompt(i, 5), max_tokens=3, ignore_eos=True))
        driver.turn()
    assert large.finish_reason == "length"
    later = smalls[2:]
    assert sum(1 for one in later if one.finish_reason) <= MAX_BYPASSES + 4
    driver.run()
    for one in [blocker, large, *smalls]:
        assert_right(one)


def test_priority_orders_waiting_and_preempts_running(overlap: bool) -> None:
    driver = Driver(num_blocks=64, overlap=overlap, scheduling_policy="priority", max_num_seqs=2)
    low = [driver.add(prompt(i, 5), max_tokens=60, ignore_eos=True, priority=10) for i in range(3)]
    for _ in range(4):
        driver.turn()
    high = driver.add(prompt(7, 5), max_tokens=5, ignore_eos=True, priority=1)
    for _ in range(15):
        driver.turn()
    assert high.finish_reason == "length"
    assert not any(one.finish_reason for one in low)
    driver.run()
    for one in [*low, high]:
        assert_right(one)


def test_fcfs_ignores_priority() -> None:
    driver = Driver(max_num_seqs=1)
    first = driver.add(prompt(1, 5), max_tokens=5, ignore_eos=True, priority=10)
    second = driver.add(prompt(2, 5), max_tokens=5, ignore_eos=True, priority=1)
    while not first.finish_reason:
        driver.turn()
        assert not second.finish_reason
    driver.run()


def test_siblings_compute_their_common_prompt_once(overlap: bool) -> None:
    driver = Driver(num_blocks=64, overlap=overlap, max_num_batched_tokens=64)
    received = [driver.add(prompt(1, 40), max_tokens=3, ignore_eos=True, request_id=f"p-{i}", parent_id="p", index=i) for i in range(4)]
    driver.run()
    for one in received:
        assert_right(one)
    # 40 tokens are 5 blocks; the last token is computed by each, so four blocks are shared and the fifth is copied.
    assert sum(driver.worker.step_tokens) == 40 + 3 * 1 + 4 * 2
    assert [one.num_cached for one in received] == [0, 39, 39, 39]


def test_a_second_turn_finds_the_first_ones_output(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    first = driver.add(prompt(1, 20), max_tokens=21, ignore_eos=True)
    driver.run()
    history = prompt(1, 20) + first.tokens + [5, 6, 7]
    second = driver.add(history, max_tokens=3, ignore_eos=True)
    driver.run()
    # 20 + 20 computed positions are five full blocks.
    assert second.num_cached == 40
    assert_right(second)
    again = driver.add(prompt(1, 20) + first.tokens[:4], max_tokens=2, ignore_eos=True)
    driver.run()
    assert again.num_cached == 23  # the last token is always computed
    assert_right(again)


def test_what_was_decoded_is_found_after_an_abort_and_by_whoever_is_preempted(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    first = driver.add(prompt(1, 20), max_tokens=100, ignore_eos=True)
    while len(first.tokens) < 30:
        driver.turn()
    assert driver.call(Pause(mode="retract")).error is None
    assert status(driver, first) is RequestStatus.PREEMPTED
    assert driver.call(Resume()).error is None
    while len(first.tokens) < 50:
        driver.turn()
    # Of what it had, no more than its last token is computed again.
    assert counter(driver, "num_preemptions") == 1
    assert counter(driver, "recomputed_tokens") == 1
    driver.abort(first)
    driver.run()
    again = driver.add_and_run(prompt(1, 20) + first.tokens + [5, 6, 7], max_tokens=2)
    assert again.num_cached == 20 + len(first.tokens) - 1
    driver.assert_idle()


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_salt_and_adapter_separate_caches(field: str) -> None:
    driver = Driver()
    for value, expected in (("", 0), ("a", 0), ("a", 19), ("b", 0)):
        one = driver.add(prompt(1, 20), max_tokens=2, **{field: value})
        driver.run()
        assert one.num_cached == expected


def test_without_prefix_caching_nothing_is_found() -> None:
    driver = Driver(enable_prefix_caching=False)
    for _ in range(2):
        one = driver.add(prompt(1, 20), max_tokens=2)
        driver.run()
        assert one.num_cached == 0


def test_tails_are_evicted_before_heads() -> None:
    driver = Driver(num_blocks=8)
    driver.add(prompt(1, 49), max_tokens=2, ignore_eos=True)
    driver.run()
    driver.add(prompt(2, 30), max_tokens=2, ignore_eos=True)
    driver.run()
    one = driver.add(prompt(1, 49), max_tokens=2, ignore_eos=True)
    driver.run()
    assert one.num_cached is not None
    assert 0 < one.num_cached < 48


def test_the_budget_is_kept_and_used(overlap: bool) -> None:
    driver = Driver(num_blocks=100, overlap=overlap, max_num_batched_tokens=16)
    for i in range(8):
        driver.add(prompt(i, 30), max_tokens=10, ignore_eos=True)
    driver.run()
    assert max(driver.worker.step_tokens) == 16
    assert driver.worker.step_tokens[:6] == [16] * 6


def test_block_tables_are_never_sent_again() -> None:
    driver = Driver(num_blocks=64)
    driver.add(prompt(1, 20), max_tokens=50, ignore_eos=True)
    grown = started = 0
    while driver.turn():
        for plan in driver.published:
            grown += len(ints(plan.grown_blocks))
            started += sum(len(ints(one.block_ids)) for one in plan.started)
    assert started + grown <= 9 * 2  # each plan is seen at most twice above
    assert_right(next(iter(driver.received.values())))


def test_a_plan_starts_only_so_many_bytes() -> None:
    length = 50_000
    driver = Driver(num_blocks=100_000, max_model_len=length + 10, max_num_batched_tokens=2_000_000, max_num_seqs=32, check_invariants=False)
    for i in range(24):
        driver.add(prompt(i, length), max_tokens=1)
    started = []
    for _ in range(4):
        plan = driver.core.schedule()
        if plan is None:
            break
        started.append(len(plan.started))
        assert sum(len(one.token_ids) + len(one.block_ids) for one in plan.started) <= MAX_STARTED_BYTES
    assert started[0] > 1
    assert sum(started) > started[0]


def test_a_plan_stays_within_one_message_whatever_its_requests_bring() -> None:
    """Bias, stop tokens and grammars travel with the plan that starts a sequence, as its prompt does."""
    driver = Driver(num_blocks=100, max_num_seqs=32)
    settings: list[dict[str, object]] = [
        {"logit_bias": dict.fromkeys(range(1 << 16), 0.123456789)},
        {"bad_words_token_ids": tuple((1 << 20,) * 60 for _ in range(2000))},
        {"grammar": GrammarSpec("regex", "é" * 500_000)},
    ]
    received = [driver.add(prompt(i, 5), max_tokens=2, ignore_eos=True, **settings[i % 3]) for i in range(24)]
    sizes = []
    for _ in range(200):
        driver.turn()
        sizes += [len(ENCODER.encode(plan)) for plan in driver.published]
    assert max(sizes) > 2 << 20
    assert max(sizes) < MIN_RING_BYTES // 2
    for one in received:
        assert_right(one)
