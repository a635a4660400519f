"""TLS connections with a bound on their handshakes, in time and in number: each counts from the moment it is accepted.

asyncio's own servers show a connection to the protocol only when its handshake is over, so that those which never begin one
would be seen by nobody. Here::

    accepted ───────── handshake ─────────▶ the protocol's connection_made()
             |<-- counted in TlsDoor -->|
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)
# Other API processes wait at the same socket, for their share.
ACCEPTED_PER_WAKE = 16
# How long to take no connections after the process ran out of descriptors or memory for them.
REST_S = 1.0
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsDoor:
    """Accepts on one listening socket and shakes hands. Runs on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        handshake_timeout_s: float,
        has_room: Callable[[], bool],
    ):
        """``has_room()``: whether one more connection may be taken; it is closed at once otherwise."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._timeout_s = handshake_timeout_s
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        # The protocols of connections whose handshake is not over.
        self.waiting: set[asyncio.Protocol] = set()

    def open(self) -> None:
        self._rest = None
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Take no more connections, and let go of those that are not through."""
        self._loop.remove_reader(self._listener)
        if self._rest is not None:
            self._rest.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    def passed(self, protocol: asyncio.Protocol) -> None:
        """The protocol's connection has been made."""
        self.waiting.discard(protocol)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_WAKE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                logger.error("no connections are taken for a moment: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(REST_S, self.open)
                return
            if not self._has_room():
                connection.close()
                continue
            connection.setblocking(False)
            # Counted from here, not from when the task gets its turn.
            protocol = self._make_protocol()
            self.waiting.add(protocol)
            handshake = self._loop.create_task(self._shake_hands(connection, protocol))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=self._timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("a TLS handshake failed: %s", error)
        finally:
            self.waiting.discard(protocol)
