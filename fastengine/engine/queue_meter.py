"""QueueMeter: how fast waiting requests are started, and so when it makes sense to come back."""

from __future__ import annotations

import math
from collections.abc import Callable

# Starts count for less the longer ago they were: 1/e after this.
HORIZON_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0


class QueueMeter:
    """An exponentially decaying count of starts."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._begun_at: float | None = None
        self._updated_at = 0.0
        self._weight = 0.0

    def started(self) -> None:
        """A request that waited has been started for the first time."""
        now = self._clock()
        if self._begun_at is None:
            self._begun_at = self._updated_at = now
        self._weight = self._decayed(now) + 1.0
        self._updated_at = now

    def starts_per_s(self) -> float:
        """0.0 until two starts have been seen at different times."""
        now = self._clock()
        if self._begun_at is None or now <= self._begun_at:
            return 0.0
        # As much of the horizon as there has been: a young meter is not a slow queue.
        return self._decayed(now) / (HORIZON_S * -math.expm1((self._begun_at - now) / HORIZON_S))

    def retry_after_s(self, num_waiting: int) -> float:
        """Seconds until about half of ``num_waiting`` requests have been started, from 1 to 120.

        Half, not one: whoever comes back when a single place is free finds it taken by others who were told the same.
        """
        rate = self.starts_per_s()
        if rate <= 0.0:
            return MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, num_waiting / 2 / rate))

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp((self._updated_at - now) / HORIZON_S)
