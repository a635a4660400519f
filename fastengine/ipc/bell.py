"""Waking a waiter in another process or thread.

The data always travels elsewhere (a ring, a queue): a bell only says "look again". It is a bound Unix
datagram socket, so a ring can't be lost between "nothing there" and "sleep", needs no atomic
operations, can be polled together with other descriptors, and a dead waiter is an error at once.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
from pathlib import Path

RING = b"\0"


class BellClosed(ConnectionError):
    """Nobody listens to this bell any more: the waiting process is gone."""


def _timeval(seconds: float) -> bytes:
    """``struct timeval``, rounded up so that a short timeout is not "for ever" (0)."""
    microseconds = -int(-seconds * 1_000_000 // 1)
    return struct.pack("ll", *divmod(microseconds, 1_000_000))


class Bell:
    """The waiting side. One owner waits; anyone who knows the path may ring."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self.path)
        self._timeout_s: float | None = None
        self._num_bytes = array.array("i", [0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until somebody rings; True if so, False after ``timeout_s``.

        Takes one ring: when several are pending the next waits return at once, so callers look for
        their data first and treat True as "look again", not as "there is one more".
        """
        if timeout_s is not None and timeout_s <= 0:
            return self._take(socket.MSG_DONTWAIT)
        if timeout_s != self._timeout_s:
            # A kernel timeout costs one call per change; Python's own would add a poll to every wait.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s or 0.0))
            self._timeout_s = timeout_s
        return self._take(0)

    def _take(self, flags: int) -> bool:
        try:
            self._socket.recv(16, flags)
        except BlockingIOError:
            return False
        return True

    def clear(self) -> None:
        """Swallow all pending rings."""
        while self._take(socket.MSG_DONTWAIT) and self._is_ringing():
            pass

    def _is_ringing(self) -> bool:
        """Whether a ring is pending: asked for, as trying in vain costs an exception, which takes ten times as long."""
        fcntl.ioctl(self._socket, termios.FIONREAD, self._num_bytes)
        return self._num_bytes[0] > 0

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class BellRinger:
    """The ringing side. Safe to use from several threads."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def ring(self) -> None:
        """Wake the waiter. Raises BellClosed if no process is bound to the path."""
        try:
            self._socket.sendto(RING, self.path)
        except BlockingIOError:
            pass  # its queue is full of rings: it will wake anyway
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise BellClosed(f"no process listens at {self.path}") from error

    def close(self) -> None:
        self._socket.close()
