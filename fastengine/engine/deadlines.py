"""Deadlines: who must be looked at when, with stale entries dropped as they surface."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
MIN_HEAP = 256


def earliest(one: float | None, other: float | None) -> float | None:
    """The first of two clock times; None is never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class Deadlines(Generic[ItemT]):
    """A heap of (clock time, item). ``is_live`` says whether an item's deadline still matters."""

    def __init__(self, is_live: Callable[[ItemT], bool]):
        self._is_live = is_live
        self._heap: list[tuple[float, int, ItemT]] = []
        self._number = 0
        self._rebuild_at = MIN_HEAP

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, item: ItemT) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, item))
        # Deadlines are far and most requests finish long before: without this the heap would hold them all.
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2])]
            heapq.heapify(self._heap)
            self._rebuild_at = max(MIN_HEAP, 2 * len(self._heap))

    def next(self) -> float | None:
        """The earliest deadline that matters."""
        heap = self._heap
        while heap and not self._is_live(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> list[ItemT]:
        if not self._heap or self._heap[0][0] > now:
            return []
        due = []
        while (when := self.next()) is not None and when <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
