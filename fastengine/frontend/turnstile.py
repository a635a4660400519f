"""Turnstile: lets a crowd in a few at a time, so that what must be quick never stands behind thousands.

An event loop runs everything that is ready before it looks for more: of 3,000 requests that arrive at once, the last
would wait until the work of all others is done, and so would a control call among them. Through the turnstile go
PER_TURN requests per turn of the loop, in order; who does not pass through it waits for these at most::

    turn n                     turn n + 1
    | PER_TURN arrivals | a control call | PER_TURN arrivals | ...
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8


class Turnstile:
    """Of one event loop. Free of cost, and of waiting, for fewer than PER_TURN arrivals at a time."""

    def __init__(self) -> None:
        self._num_passed = 0  # in this turn of the loop
        self._is_turning = False
        self._crowd: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when it is this caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_passed < PER_TURN and not self._crowd:
            self._num_passed += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._crowd.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_passed = 0
        while self._crowd and self._num_passed < PER_TURN:
            place = self._crowd.popleft()
            if not place.done():  # else its caller was cancelled
                place.set_result(None)
                self._num_passed += 1
        self._is_turning = self._num_passed > 0
        if self._is_turning:
            loop.call_soon(self._turn, loop)
