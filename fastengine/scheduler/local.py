"""LocalScheduler: requests wait in this process, first come first served or by priority."""

from __future__ import annotations

import heapq
from typing import Literal

from fastengine.scheduler.base import Rank, RequestT, Scheduler

# A heap is rebuilt when it holds this many removed entries and more of them than live ones.
MIN_STALE = 64


class LocalScheduler(Scheduler[RequestT]):
    """A heap over ranks; removal by id leaves a stale entry behind that is skipped later."""

    def __init__(self, policy: Literal["fcfs", "priority"]):
        self._by_priority = policy == "priority"
        self._waiting: dict[str, RequestT] = {}
        self._heap: list[tuple[Rank, str]] = []
        self._num_tokens = 0

    def rank(self, request: RequestT) -> Rank:
        return (request.priority if self._by_priority else 0, request.arrival_number)

    def put(self, request: RequestT) -> None:
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} waits already")
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self.rank(request), request.request_id))
        self._num_tokens += request.num_prompt

    def take(self, max_requests: int, max_tokens: int) -> list[RequestT]:
        taken: list[RequestT] = []
        while len(taken) < max_requests and self.first_rank() is not None:
            request = self._waiting[self._heap[0][1]]
            if taken and request.num_prompt > max_tokens:
                break
            heapq.heappop(self._heap)
            self._forget(request)
            max_tokens -= request.num_prompt
            taken.append(request)
        return taken

    def remove(self, request_id: str) -> RequestT | None:
        request = self._waiting.get(request_id)
        if request is None:
            return None
        self._forget(request)
        stale = len(self._heap) - len(self._waiting)
        if stale > max(MIN_STALE, len(self._waiting)):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return request

    def first_rank(self) -> Rank | None:
        heap = self._heap
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def _forget(self, request: RequestT) -> None:
        del self._waiting[request.request_id]
        self._num_tokens -= request.num_prompt

    def _is_live(self, entry: tuple[Rank, str]) -> bool:
        # An id may be used again after its request was removed: the rank tells the two apart.
        request = self._waiting.get(entry[1])
        return request is not None and request.arrival_number == entry[0][1]
