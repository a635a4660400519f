"""Deadlines come due in order, stale ones don't count, and finished items aren't kept for ever."""

from __future__ import annotations

from fastengine.engine.deadlines import MIN_HEAP, Deadlines


def test_items_come_due_in_order_of_time() -> None:
    deadlines: Deadlines[str] = Deadlines(lambda item: True)
    for when, item in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (1.0, "a2")):
        deadlines.add(when, item)
    assert deadlines.next() == 1.0
    assert deadlines.pop_due(0.9) == []
    assert deadlines.pop_due(2.0) == ["a", "a2", "b"]
    assert deadlines.next() == 3.0


def test_stale_items_neither_come_due_nor_wake_anyone() -> None:
    live = {"a", "b"}
    deadlines: Deadlines[str] = Deadlines(lambda item: item in live)
    deadlines.add(1.0, "a")
    deadlines.add(2.0, "b")
    live.remove("a")
    assert deadlines.next() == 2.0
    assert deadlines.pop_due(5.0) == ["b"]
    live.remove("b")
    assert deadlines.next() is None


def test_finished_items_do_not_pile_up() -> None:
    live: set[int] = set()
    deadlines: Deadlines[int] = Deadlines(lambda item: item in live)
    for i in range(20 * MIN_HEAP):
        live.add(i)
        deadlines.add(1e9 + i, i)
        live.discard(i - 10)
    assert len(deadlines) <= MIN_HEAP
    assert deadlines.next() == 1e9 + 20 * MIN_HEAP - 10
    assert sorted(deadlines.pop_due(2e9)) == sorted(live)


def test_many_live_items_are_all_kept() -> None:
    deadlines: Deadlines[int] = Deadlines(lambda item: True)
    for i in range(3 * MIN_HEAP):
        deadlines.add(float(i), i)
    assert deadlines.pop_due(1e9) == list(range(3 * MIN_HEAP))
