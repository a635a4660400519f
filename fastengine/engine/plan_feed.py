"""PlanFeed: what goes to the workers, in order, and whether the steps in flight still move."""

from __future__ import annotations

import logging
import time
from collections import deque

from fastengine.ipc.bell import BellClosed
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.ring import RingFull
from fastengine.ipc.worker_link import EngineEnd
from fastengine.protocol.steps import StepPlan, WorkerCommand

logger = logging.getLogger(__name__)


class PlanFeed:
    """Publishes to one generation of workers. What the ring has no room for waits here.

    Workers *move* when they answer a step, or are given one while none is in flight: those that wait for
    work are never stuck.
    """

    def __init__(self, link: EngineEnd, watchdog_timeout_s: float):
        """``watchdog_timeout_s`` 0: steps may take as long as they like."""
        self.link = link
        self._timeout_s = watchdog_timeout_s
        self._backlog: deque[bytes] = deque()
        self._num_in_flight = 0
        self._moved_at = 0.0
        self.has_lost_rank = False  # a rank no longer listens: its process handle will tell

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def send(self, message: StepPlan | WorkerCommand) -> None:
        if isinstance(message, StepPlan):
            if not self._num_in_flight:
                self._moved_at = time.monotonic()
            self._num_in_flight += 1
        encoded = ENCODER.encode(message)
        if self._backlog or not self._publish(encoded):
            self._backlog.append(encoded)

    def flush(self) -> None:
        """Publish what waits, as far as there is room now."""
        while self._backlog and self._publish(self._backlog[0]):
            self._backlog.popleft()

    def _publish(self, encoded: bytes) -> bool:
        try:
            self.link.publish(encoded)
        except RingFull:
            return False
        except BellClosed as error:
            # The message is in the ring. The group's end is the process handle's business.
            if not self.has_lost_rank:
                logger.warning("a worker rank no longer listens: %s", error)
            self.has_lost_rank = True
        return True

    def answered(self) -> None:
        """A result has come."""
        self._num_in_flight -= 1
        self._moved_at = time.monotonic()

    def stuck_at(self) -> float | None:
        """When (``time.monotonic()``) the steps in flight count as stuck; None while there are none, or no limit."""
        return self._moved_at + self._timeout_s if self._num_in_flight and self._timeout_s else None
