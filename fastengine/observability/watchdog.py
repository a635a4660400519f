"""Watchdogs over a process's own threads: a thread that hangs while it has work ends its process, with its stacks.

A watched thread arms a timer of the kernel when it takes up work and disarms it before it waits, so that
an idle process does nothing at all. When the timer expires, the C handler of :mod:`faulthandler` writes
where every thread stands to stderr and the process dies of SIGALRM: that needs neither the GIL nor a
thread that still turns. Whoever started the process sees it die and acts as for any other death.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import signal
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

CLOCK_MONOTONIC = 1
# The event loop renews its timer this many times per timeout while it has work.
BEATS_PER_TIMEOUT = 4


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: interval and time to expiry, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


def _timer_library() -> ctypes.PyDLL:
    # PyDLL keeps the GIL: the calls take a microsecond, giving it up and taking it again may take much longer.
    for name in (None, "librt.so.1"):  # part of libc since glibc 2.34
        library = ctypes.PyDLL(name, use_errno=True)
        if hasattr(library, "timer_create"):
            return library
    raise OSError("the C library has no timer_create")


def enable_stack_dumps() -> None:
    """From now on a fatal error and SIGUSR1 write where every thread stands to stderr, and so does SIGALRM, which ends the process."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, sys.stderr, all_threads=True, chain=True)


class ThreadWatchdog:
    """One thread's timer. ``with watchdog:`` around each piece of work; ``timeout_s`` 0 watches nothing.

    :func:`enable_stack_dumps` must have been called.
    """

    def __init__(self, timeout_s: float):
        self._timer: ctypes.c_void_p | None = None
        if not timeout_s:
            return
        self._library = _timer_library()
        self._timer = ctypes.c_void_p()
        # No event given: the timer sends SIGALRM to the process.
        self._check(self._library.timer_create(CLOCK_MONOTONIC, None, ctypes.byref(self._timer)))
        seconds = int(timeout_s)
        # Whoever turns often arms and disarms often.
        self._settime = self._library.timer_settime
        self._armed = ctypes.byref(_TimerSpec(0, 0, seconds, int((timeout_s - seconds) * 1e9)))
        self._disarmed = ctypes.byref(_TimerSpec(0, 0, 0, 0))

    def arm(self) -> None:
        """Begin to count, or begin again."""
        if self._timer is not None:
            self._check(self._settime(self._timer, 0, self._armed, None))

    def disarm(self) -> None:
        if self._timer is not None:
            self._check(self._settime(self._timer, 0, self._disarmed, None))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "a watchdog's timer can't be set")

    def __enter__(self) -> ThreadWatchdog:
        self.arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disarm()

    def close(self) -> None:
        if self._timer is not None:
            self._library.timer_delete(self._timer)
            self._timer = None


class EventLoopWatchdog:
    """Watches an asyncio loop while it has work: between :meth:`begin` and :meth:`end`, which may nest.

    While there is work the loop renews the timer a few times per ``timeout_s``; without work it does nothing.
    """

    def __init__(self, timeout_s: float):
        self._watchdog = ThreadWatchdog(timeout_s)
        self._period_s = timeout_s / BEATS_PER_TIMEOUT
        self._num_pieces = 0
        self._beat: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """To be called on the loop."""
        self._num_pieces += 1
        if self._num_pieces == 1 and self._period_s:
            self._renew()

    def end(self) -> None:
        self._num_pieces -= 1
        if self._num_pieces == 0 and self._beat is not None:
            self._beat.cancel()
            self._beat = None
            self._watchdog.disarm()

    def over(self, app: AsgiApp) -> AsgiApp:
        """``app``, its loop watched while any request is open."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            self.begin()
            try:
                await app(scope, receive, send)
            finally:
                self.end()

        return watched

    def _renew(self) -> None:
        self._watchdog.arm()
        self._beat = asyncio.get_running_loop().call_later(self._period_s, self._renew)
