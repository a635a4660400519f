"""Looking again for a moment before going to sleep.

Waking a sleeping process on another core takes tens of microseconds. When the answer is due sooner than
that, looking for it is cheaper than sleeping; when it is not, looking only takes the core from others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Longest look, and the longest wait after which the next one is worth a look: a wake-up's cost and some more.
SPIN_S = 100e-6
WORTHWHILE_S = 250e-6


class Spinner:
    """Decides by the last wait whether the next one begins with a look. One per waiting thread.

    Whoever waits longer than ``WORTHWHILE_S`` sleeps at once next time, so a process that has nothing to
    do, whose partner computes for milliseconds, or that must share its core, spins at most once.
    """

    def __init__(self) -> None:
        self._last_wait_s = 0.0
        self._began = 0.0

    def look(self, find: Callable[[], T | None]) -> T | None:
        """What ``find`` returns, tried for a moment; None: sleep, and call :meth:`woken` afterwards."""
        now = self._began = time.perf_counter()
        if self._last_wait_s > WORTHWHILE_S:
            return None
        end = now + SPIN_S
        while now < end:
            os.sched_yield()  # a process that shares this core goes first
            found = find()
            now = time.perf_counter()
            if found is not None:
                self._last_wait_s = now - self._began
                return found
        return None

    def woken(self) -> None:
        """The sleep that followed a look in vain is over."""
        self._last_wait_s = time.perf_counter() - self._began
