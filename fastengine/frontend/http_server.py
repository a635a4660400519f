"""uvicorn without its clock: the main loop waits for a signal instead of looking ten times a second."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from fastengine.config import ServerConfig
from fastengine.frontend.door import Door
from fastengine.frontend.http_protocol import TimedProtocol
from fastengine.frontend.shares import Shares

logger = logging.getLogger(__name__)
# Longer than most clients and load balancers keep an idle connection, so that they close it, not we.
KEEP_ALIVE_S = 75
# A client that means it needs two round trips for a TLS handshake.
MAX_HANDSHAKE_S = 10.0
# After the drain's end, how long replies that say so get to be sent, and requests that hang on to be cancelled.
LAST_WORDS_S = 1.0
# So many connections past the bound still get through their TLS handshake, to be told so with a 503.
TOLD_SO = 64
# Descriptors for anything but connections.
SPARE_DESCRIPTORS = 128


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or :meth:`stop`; then lets running requests finish within the shutdown timeout.

    ``begin_shutdown`` is called when nothing new is accepted any more. A second signal, or the timeout, ends the drain:
    ``end_requests`` is called to make running requests answer at once that the server shuts down. It returns how many there were.
    ``on_refused`` gets the status of each reply that was given before, or without, any request's reaching the application.
    """

    def __init__(
        self,
        app: Any,
        server: ServerConfig,
        *,
        begin_shutdown: Callable[[], None] = lambda: None,
        end_requests: Callable[[], int] = lambda: 0,
        on_refused: Callable[[int], None] = lambda status: None,
        shares: Shares | None = None,
    ):
        self._drain_s = server.shutdown_timeout
        self._handshake_s = min(server.request_read_timeout, MAX_HANDSHAKE_S)
        self._begin_shutdown = begin_shutdown
        self._end_requests = end_requests
        self._max_connections = allowed_connections(server.max_connections)
        self._doors: list[Door] = []
        self._shares = shares
        self._busy: set[asyncio.Protocol] = set()  # connections with a request under way
        protocol = functools.partial(
            TimedProtocol,
            read_timeout_s=server.request_read_timeout,
            max_connections=self._max_connections,
            on_made=self._connection_made,
            on_all_closed=self._connections_closed,
            on_refused=on_refused,
            on_busy=self._busy_changed,
        )
        config = uvicorn.Config(
            app,
            loop="auto",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=server.ssl_certfile,
            ssl_keyfile=server.ssl_keyfile,
        )
        super().__init__(config)
        # Its warnings are about what clients send; they get an answer, and nobody else needs to know.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``, each behind a :class:`Door`."""
        config = self.config
        protocol: Callable[[], asyncio.Protocol] = functools.partial(
            config.http_protocol_class,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for one in sockets or ():
            door = Door(
                one,
                config.ssl,
                protocol,
                handshake_timeout_s=self._handshake_s,
                has_room=self._has_room,
                on_accepted=self._show_load,
                shares=self._shares,
            )
            self._doors.append(door)
            door.open()
        if self._shares is not None:
            self._shares.enter()
        self.started = True

    def _connection_made(self, protocol: asyncio.Protocol) -> int:
        for door in self._doors:
            door.passed(protocol)
        return self._num_handshakes()

    def _busy_changed(self, protocol: asyncio.Protocol, is_busy: bool) -> None:
        if is_busy:
            self._busy.add(protocol)
        else:
            self._busy.discard(protocol)
        self._show_load()

    def _show_load(self) -> None:
        if self._shares is not None:
            self._shares.show(len(self.server_state.connections) + self._num_handshakes() + len(self._busy))

    def _num_handshakes(self) -> int:
        return sum(len(door.waiting) for door in self._doors)

    def _has_room(self) -> bool:
        return len(self.server_state.connections) + self._num_handshakes() < self._max_connections + TOLD_SO

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._exit, self._hurry, self._all_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.server_state.default_headers = self.config.encoded_headers
        if not self.should_exit:
            await self._exit.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._shares is not None:
            self._shares.leave()
        for sock in sockets or []:
            sock.close()
        for door in self._doors:
            door.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self._begin_shutdown()
        if self.force_exit or not await self._drained(self._drain_s):
            await self._end()

    async def _drained(self, timeout_s: float) -> bool:
        """Wait until all requests are answered and the answers sent; False when the time, or somebody's patience, is over."""
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.create_task(self._all_ended())
        try:
            await asyncio.wait({hurry, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return ended.done()
        finally:
            hurry.cancel()
            ended.cancel()

    async def _all_ended(self) -> None:
        while self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks))
        while self.server_state.connections:
            self._all_closed.clear()
            await self._all_closed.wait()

    def _connections_closed(self) -> None:
        with contextlib.suppress(AttributeError):  # a connection that came and went before the main loop began
            self._all_closed.set()

    async def _end(self) -> None:
        """Tell whoever still waits that it is over, then end what does not take the hint."""
        num_ended = self._end_requests()
        if num_ended:
            why = "before a second signal came" if self._hurry.is_set() else f"within {self._drain_s:g} s (--shutdown-timeout)"
            logger.warning("%d requests had not finished %s: they were told so", num_ended, why)
        self._hurry.clear()
        if self.force_exit or await self._drained(LAST_WORDS_S):
            return
        for connection in list(self.server_state.connections):
            if isinstance(connection, TimedProtocol) and connection.is_answering:
                connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
        await self._drained(LAST_WORDS_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded as captured: uvicorn would raise the signal again at the end, and the exit code be its number.
        if self.should_exit:
            if sig == signal.SIGINT:
                self.force_exit = True
            if self.started:
                self._loop.call_soon_threadsafe(self._hurry.set)
        self.stop()

    def stop(self) -> None:
        """Begin to shut down. May be called by a signal handler."""
        self.should_exit = True
        if self.started:
            self._loop.call_soon_threadsafe(self._exit.set)


def allowed_connections(wanted: int) -> int:
    """``wanted``, or as many as the process may have descriptors for; raises the soft limit if that helps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - SPARE_DESCRIPTORS))
