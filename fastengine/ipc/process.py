"""Processes that can't outlive each other, and signals as plain events."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
# A process that ends with this code would end the same way again: it is not started again, and its last line says why.
EXIT_HOPELESS = 3
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process ``signum`` when ``parent_pid`` ends, however it ends.

    Call it first thing in a child. A parent that died before the call is noticed too. The kernel
    watches the parent's *thread*: children must be started by a thread that lives as long as its process.
    """
    if _libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"parent process {parent_pid} is gone")


def tied_to_parent(command: list[str], signum: int = signal.SIGTERM) -> list[str]:
    """``command`` for a child that knows nothing of its parent, and is sent ``signum`` when that ends, however it ends.

    As with :func:`die_with_parent`, the thread that starts it must live as long as its process. Needs util-linux 2.33.
    """
    return ["setpriv", "--pdeathsig", signal.Signals(signum).name.removeprefix("SIG"), *command]


def is_alive(pid: int) -> bool:
    """Whether there is a process ``pid``, somebody else's included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wake_without_preempting() -> None:
    """Have the kernel give this thread a core that is free, or when whoever runs there pauses, but take none away at its waking.

    On a machine whose cores all compute a step, a process that wakes for a moment would stop one thread of it in
    the middle of a task and let the others wait for that. Threads and processes started later inherit it.
    """
    _set_policy(os.SCHED_BATCH)


def preempt_as_usual() -> None:
    """Undo :func:`wake_without_preempting`, for a child of a process that called it."""
    _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may refuse: then it is as it was
        os.sched_setscheduler(0, policy, os.sched_param(0))


class SignalInbox:
    """SIGTERM, SIGINT and SIGCHLD as bytes on a descriptor that an event loop can wait for."""

    def __init__(self, *signums: int):
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> Iterator[int]:
        """The numbers of the signals that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            while True:
                yield from self._read.recv(64)
