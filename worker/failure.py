"""The last words of a rank that dies of an exception. Imports nothing of Paddle, which may be what failed."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Literal

import msgspec

from fastengine.ipc.bell import BellClosed
from fastengine.ipc.ring import RingFull
from fastengine.ipc.worker_link import WorkerEnd
from fastengine.protocol.steps import WorkerFailure

Phase = Literal["start", "step", "command"]
FAILURE_EXIT_CODE = 1


def report_failure(link: WorkerEnd, rank: int, error: Exception, *, phase: Phase, step_id: int = -1) -> None:
    """Print ``error`` with its traceback to stderr and send it to the engine as a WorkerFailure."""
    trace = "".join(traceback.format_exception(error))
    print(trace, file=sys.stderr, flush=True)
    failure = WorkerFailure(rank=rank, phase=phase, message=f"{type(error).__name__}: {error}", traceback=trace, step_id=step_id)
    with contextlib.suppress(BellClosed, RingFull):  # an engine that is gone or stuck notices the exit code
        link.send(msgspec.msgpack.encode(failure))
