"""PlanFeed: what goes to the workers, in order, and whether they still move."""

from __future__ import annotations

import logging
import time
from collections import deque

from fastengine.engine.command_watch import CommandWatch, Standstill
from fastengine.ipc.bell import BellClosed
from fastengine.ipc.channels import ENCODER
from fastengine.ipc.ring import RingFull
from fastengine.ipc.worker_link import EngineEnd
from fastengine.protocol.steps import StepPlan, WorkerCommand, WorkerReply

logger = logging.getLogger(__name__)


class PlanFeed:
    """Publishes to one generation of workers. What the ring has no room for waits here.

    Workers *move* when they answer a step or a command, get on with a command (see CommandWatch), or are given a step
    while none is in flight: those that wait for work are never stuck.
    """

    def __init__(self, link: EngineEnd, watchdog_timeout_s: float):
        """``watchdog_timeout_s`` 0: they may stand still as long as they like."""
        self.link = link
        self._timeout_s = watchdog_timeout_s
        self._backlog: deque[bytes] = deque()
        self._commands = CommandWatch(link.signals, link.num_ranks)
        self._num_in_flight = 0
        self._moved_at = 0.0  # with steps
        self.has_lost_rank = False  # a rank no longer listens: its process handle will tell

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def num_in_flight(self) -> int:
        """Steps that are not answered."""
        return self._num_in_flight

    def send(self, message: StepPlan | WorkerCommand) -> None:
        if isinstance(message, StepPlan):
            if not self._num_in_flight:
                self._moved_at = time.monotonic()
            self._num_in_flight += message.num_steps
        else:
            self._commands.sent(message)
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

    def cut_runs(self, last_step_id: int) -> None:
        """No step of a run up to that one is begun any more, once the workers see it."""
        for rank in range(self.link.num_ranks):
            self.link.signals.set("last_cut_step_id", rank, last_step_id)

    def answered(self, num_steps: int = 1) -> None:
        """A result of so many steps has come."""
        self._num_in_flight -= num_steps
        self._moved_at = time.monotonic()

    def replied(self, reply: WorkerReply) -> None:
        """A rank has answered a command."""
        if self._commands.answered(reply):
            self._moved_at = time.monotonic()  # steps that came after it could not begin before

    def standstill(self) -> Standstill | None:
        """What has not moved for longest; None while the workers have nothing to do, or there is no limit."""
        if not self._timeout_s or not (self._num_in_flight or self._commands):
            return None
        if not self._commands:
            return Standstill(self._moved_at, "a step")
        found = [Standstill(max(self._moved_at, one.since), one.what) for one in self._commands.standstills()]
        if self._num_in_flight:
            # Steps may lie behind a command.
            found.append(Standstill(max(self._moved_at, self._commands.last_move()), "a step"))
        return min(found, key=lambda one: one.since, default=None)

    def stuck_at(self) -> float | None:
        """When (``time.monotonic()``) the workers count as stuck, as far as is known now."""
        if not self._commands:
            return self._moved_at + self._timeout_s if self._timeout_s and self._num_in_flight else None
        standstill = self.standstill()
        return None if standstill is None else standstill.since + self._timeout_s
