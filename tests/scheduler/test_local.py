"""The local queue: order, allowances, removal by id."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastengine.scheduler.local import MIN_STALE, LocalScheduler


@dataclass
class Item:
    request_id: str
    arrival_number: int
    num_prompt: int = 1
    priority: int = 0


def ids(items: list[Item]) -> list[str]:
    return [item.request_id for item in items]


def test_first_come_first_served_whatever_the_priority() -> None:
    queue: LocalScheduler[Item] = LocalScheduler("fcfs")
    for i in range(4):
        queue.put(Item(f"r{i}", i, priority=-i))
    assert ids(queue.take(3, 100)) == ["r0", "r1", "r2"]
    assert len(queue) == 1


def test_priority_then_arrival() -> None:
    queue: LocalScheduler[Item] = LocalScheduler("priority")
    for i, priority in enumerate([2, 1, 2, 1]):
        queue.put(Item(f"r{i}", i, priority=priority))
    assert queue.first_rank() == (1, 1)
    assert ids(queue.take(10, 100)) == ["r1", "r3", "r0", "r2"]
    assert queue.first_rank() is None


def test_the_token_allowance_never_blocks_the_first() -> None:
    queue: LocalScheduler[Item] = LocalScheduler("fcfs")
    for i, length in enumerate([50, 3, 3, 5]):
        queue.put(Item(f"r{i}", i, num_prompt=length))
    assert queue.num_tokens == 61
    assert ids(queue.take(9, 10)) == ["r0"]
    assert ids(queue.take(9, 6)) == ["r1", "r2"]
    assert queue.num_tokens == 5


def test_removal_by_exact_id_and_reuse_of_an_id() -> None:
    queue: LocalScheduler[Item] = LocalScheduler("fcfs")
    queue.put(Item("a", 1))
    queue.put(Item("ab", 2))
    with pytest.raises(ValueError, match="waits already"):
        queue.put(Item("a", 3))
    assert queue.remove("b") is None
    removed = queue.remove("a")
    assert removed is not None
    queue.put(Item("a", 3, num_prompt=7))
    assert ids(queue.take(5, 100)) == ["ab", "a"]
    assert queue.num_tokens == 0


def test_removed_entries_do_not_pile_up() -> None:
    queue: LocalScheduler[Item] = LocalScheduler("fcfs")
    queue.put(Item("stays", 0))
    for i in range(1, 50 * MIN_STALE):
        queue.put(Item(f"r{i}", i))
        queue.remove(f"r{i}")
    assert len(queue._heap) <= 2 * MIN_STALE + 2
    assert ids(queue.take(5, 5)) == ["stays"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9))), st.sampled_from(["fcfs", "priority"]))
def test_takes_come_out_in_rank_order(arrivals: list[tuple[int, int]], policy: str) -> None:
    queue: LocalScheduler[Item] = LocalScheduler(policy)  # type: ignore[arg-type]
    items = [Item(f"r{i}", i, length, priority) for i, (priority, length) in enumerate(arrivals)]
    for item in items:
        queue.put(item)
    taken: list[Item] = []
    while len(queue):
        taken += queue.take(2, 8)
    assert taken == sorted(items, key=queue.rank)
