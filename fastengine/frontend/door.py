"""Where connections come in, with or without TLS: how many at a time, which process takes them, and bounds on their handshakes.

asyncio's own servers take whatever waits, and show a connection to the protocol only when its TLS handshake is over, so that
those which never begin one would be seen by nobody. Here::

    waits in the kernel ──▶ accepted ───────── handshake ─────────▶ the protocol's connection_made()
            |                    |<---- counted in Door.waiting --->|
       nobody else has less to do
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any

from fastengine.frontend.shares import Shares

logger = logging.getLogger(__name__)
# Other API processes wait at the same socket, for their share.
ACCEPTED_PER_WAKE = 16
# How long a process leaves a connection to one that has less to do. That one was woken with it, and is done long before, unless it
# is busy or stopped; then whoever comes back takes what is still there.
ASIDE_S = 0.002
LEAST_TAKEN_BACK = 2
# How long a client's part of a TLS connection's end is waited for. It counts as open so long, and asyncio's own patience is half a minute.
GOODBYE_S = 1.0
# How long to take no connections after the process ran out of descriptors or memory for them.
REST_S = 1.0
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Door:
    """Accepts on one listening socket. Runs on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        handshake_timeout_s: float,
        has_room: Callable[[], bool],
        on_accepted: Callable[[], None] = lambda: None,
        shares: Shares | None = None,
    ):
        """``has_room()``: whether one more connection may be taken; it is closed at once otherwise. ``on_accepted()``: one more is in
        :attr:`waiting`. ``context`` None: no TLS; ``shares`` None: nobody else waits at ``listener``."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls: dict[str, Any] = {}
        if context is not None:
            self._tls = {"ssl": context, "ssl_handshake_timeout": handshake_timeout_s}
            if sys.version_info >= (3, 11) or not isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
                self._tls["ssl_shutdown_timeout"] = GOODBYE_S
        self._has_room = has_room
        self._on_accepted = on_accepted
        self._shares = shares
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        # The protocols of connections that are not made yet: with TLS, whose handshake is not over.
        self.waiting: set[asyncio.Protocol] = set()

    def open(self) -> None:
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take no more connections, and let go of those that are not through."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for connecting in self._connecting:
            connecting.cancel()

    def passed(self, protocol: asyncio.Protocol) -> None:
        """The protocol's connection has been made."""
        self.waiting.discard(protocol)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _pause_for(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, then)

    def _accept(self) -> None:
        """Take connections as long as they are this process's to take."""
        for _ in range(ACCEPTED_PER_WAKE):
            if self._shares is not None and self._shares.somebody_has_less():
                self._pause_for(ASIDE_S, self._back)
                return
            if not self._accept_one():
                return

    def _back(self) -> None:
        """Take of what the others have left; the more, the more there is here already, so that a crowd is soon taken in."""
        assert self._shares is not None
        self._resume()
        for _ in range(LEAST_TAKEN_BACK + self._shares.amount // 8):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """False when there is none, or no more can be had for now."""
        try:
            connection, _address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            logger.error("no connections are taken for a moment: %s", error.strerror)
            self._pause_for(REST_S, self._resume)
            return False
        if not self._has_room():
            connection.close()
            return True
        connection.setblocking(False)
        # Counted from here, not from when the task gets its turn.
        protocol = self._make_protocol()
        self.waiting.add(protocol)
        self._on_accepted()
        connecting = self._loop.create_task(self._connect(connection, protocol))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("a connection was not made: %s", error)
        finally:
            self.waiting.discard(protocol)
