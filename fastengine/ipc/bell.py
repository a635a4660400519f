"""Waking a waiter in another process or thread.

The data always travels elsewhere (a ring, a queue): a bell only says "look again". It is a bound Unix
datagram socket, so a ring can't be lost between "nothing there" and "sleep", needs no atomic
operations, can be polled together with other descriptors, and a dead waiter is an error at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

RING = b"\0"


class BellClosed(ConnectionError):
    """Nobody listens to this bell any more: the waiting process is gone."""


class Bell:
    """The waiting side. One owner waits; anyone who knows the path may ring."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(self.path)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until somebody rings; True if so, False after ``timeout_s``. Swallows all pending rings."""
        ready = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        if ready:
            self.clear()
        return bool(ready)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)

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
