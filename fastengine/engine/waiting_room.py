"""WaitingRoom: the requests that don't run, in the order they should.

Requests that never ran wait in the scheduler; a bounded *window* of the first of them, and every preempted
one, stands here to be looked at in each step. Looking past the first is what keeps one large request from
holding up small ones; that the window is short, and that a request can be bypassed only so often, is what
keeps small ones from holding up the large one for ever.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.scheduler.base import Scheduler

WINDOW = 32

Place = tuple[int, bool, int]


class WaitingRoom:
    """Owns the window; ``scheduler`` holds what is behind it."""

    def __init__(self, scheduler: Scheduler[RequestState]):
        self._scheduler = scheduler
        self._window: list[RequestState] = []
        self._num_window_tokens = 0  # prompt tokens of requests in the window that never ran
        self._num_preempted = 0
        # Nothing that could be admitted has been found since the last change: see ResourceManager.
        self.is_settled = False

    def __len__(self) -> int:
        return len(self._scheduler) + len(self._window)

    @property
    def num_waiting(self) -> int:
        """Requests that never ran."""
        return len(self) - self._num_preempted

    @property
    def num_preempted(self) -> int:
        return self._num_preempted

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of requests that never ran."""
        return self._scheduler.num_tokens + self._num_window_tokens

    def put(self, request: RequestState) -> None:
        self._scheduler.put(request)
        self.is_settled = False

    def put_back(self, request: RequestState) -> None:
        """A request that left the window or was preempted; preempted ones are first among those of their priority."""
        self._insert(request)
        if request.status is RequestStatus.PREEMPTED:
            self._num_preempted += 1
        else:
            self._num_window_tokens += request.num_prompt
        self.is_settled = False

    def at(self, index: int) -> RequestState | None:
        """The request at ``index`` of the window, best first; None past its end."""
        if index >= len(self._window):
            self._refill()
        return self._window[index] if index < len(self._window) else None

    def refresh(self) -> None:
        """Let requests that arrived with a better priority than the window's last into it."""
        self._refill()

    def take(self, request: RequestState) -> None:
        """``request``, which stands in the window, is about to run."""
        self._window.remove(request)
        self._discount(request)

    def remove(self, request: RequestState) -> None:
        """``request`` no longer waits. It must wait here."""
        if self._scheduler.remove(request.request_id) is None:
            self.take(request)
        self.is_settled = False

    def _refill(self) -> None:
        while True:
            rank = self._scheduler.first_rank()
            if rank is None:
                return
            if len(self._window) >= WINDOW + self._num_preempted:
                last = self._place(self._window[-1])
                if (rank[0], True, rank[1]) >= last:
                    return
            for request in self._scheduler.take(1, 0):
                self._insert(request)
                self._num_window_tokens += request.num_prompt

    def _insert(self, request: RequestState) -> None:
        key: Callable[[RequestState], Place] = self._place
        bisect.insort(self._window, request, key=key)

    def _discount(self, request: RequestState) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self._num_preempted -= 1
        else:
            self._num_window_tokens -= request.num_prompt

    def _place(self, request: RequestState) -> Place:
        priority, number = self._scheduler.rank(request)
        return (priority, request.status is not RequestStatus.PREEMPTED, number)

    def check(self) -> None:
        places = [self._place(request) for request in self._window]
        assert places == sorted(places), "the window is out of order"
        preempted = sum(1 for request in self._window if request.status is RequestStatus.PREEMPTED)
        assert preempted == self._num_preempted, f"{preempted} preempted requests wait, {self._num_preempted} are counted"
        tokens = sum(request.num_prompt for request in self._window if request.status is RequestStatus.WAITING)
        assert tokens == self._num_window_tokens, f"{tokens} prompt tokens in the window, {self._num_window_tokens} are counted"
