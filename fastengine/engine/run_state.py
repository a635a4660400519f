"""RunState: whether steps are planned, and the way from running to paused and back.

::

    RUNNING --pause drain--> DRAINING --nothing runs any more--> HALTED
    RUNNING --pause abort, retract, in_place; sleep--> HALTED
    DRAINING, HALTED --resume, a pause's timeout, the last wakeup--> RUNNING

HALTED plans no step; *stopped* is HALTED with no step in flight: only then is a pause answered. *Held* says that an
operator wants it so: what stops the engine for a reason of its own (an update, a sleep that fails) lets it go on
afterwards only if nobody holds it.
"""

from __future__ import annotations

import enum

from fastengine.engine.pipeline import Pipeline
from fastengine.engine.request_state import RequestStatus, RequestTable
from fastengine.engine.resource_manager import ResourceManager


class Mode(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    HALTED = "halted"


# What may hold blocks or has run before. WAITING_KV soon becomes one of the others.
STARTED = (RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING_KV)


class RunState:
    def __init__(self, table: RequestTable, pipeline: Pipeline, resources: ResourceManager):
        self._table = table
        self._pipeline = pipeline
        self._resources = resources
        self.mode = Mode.RUNNING
        self.held = False
        self._retract = False

    @property
    def is_stopped(self) -> bool:
        """No step is in flight, and none will be until someone resumes."""
        return self.mode is Mode.HALTED and not len(self._pipeline)

    def drain(self) -> None:
        """Admit nothing new; halt when nothing runs any more. Without effect when halted already."""
        if self.mode is Mode.RUNNING:
            self.mode = Mode.DRAINING
            self._resources.look_again()

    def halt(self, *, retract: bool) -> None:
        """Plan no more steps. ``retract``: once stopped, running requests give up their blocks."""
        self.mode = Mode.HALTED
        self._retract = self._retract or retract

    def run(self) -> None:
        self.mode = Mode.RUNNING
        self.held = False
        self._retract = False
        self._resources.look_again()

    @property
    def has_unfinished(self) -> bool:
        """Something has begun and not ended: what a drain waits for."""
        return bool(self._table.count(*STARTED))

    def settle(self) -> bool:
        """Do what is due now; returns :attr:`is_stopped`."""
        if self.mode is Mode.DRAINING and not len(self._pipeline) and not self.has_unfinished:
            self.mode = Mode.HALTED
        if self.is_stopped and self._retract:
            self._retract = False
            self._resources.preempt_all()
        return self.is_stopped
