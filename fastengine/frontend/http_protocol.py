"""HTTP connections with deadlines: a client must send its whole request in time, and only so many may be open.

uvicorn's protocol has a clock for idle connections alone. Here one clock runs per request, from the connection's
beginning (or a later request's first byte) until its last byte::

    connection made ── headers ── body ── last byte        the reply takes as long as it takes
    |<-------- request_read_timeout ----->|

A reply's server-sent events have a short way out, past the layers between them and the socket: :class:`DirectBody`.

The body's reader (:class:`fastengine.entrypoints.http_gate.HttpGate`) answers 408 when that is over; a connection that has not
even sent its headers, or goes on sending after its answer, is closed a little later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from fastengine.frontend.errors import ApiError
from fastengine.frontend.strict_protocol import StrictProtocol

# The scope's key of a ReadClock.
READ_CLOCK = "fastengine.read_clock"
# The scope's key of a DirectBody.
DIRECT_BODY = "fastengine.direct_body"
# How much longer than the body's reader the connection waits.
CLOSE_MARGIN_S = 1.0


class ReadClock:
    """When a request must have been read (the loop's time), and whether it has been."""

    __slots__ = ("complete", "deadline")

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.complete = False


class DirectBody:
    """Pieces of one reply's body, written without passing through the middleware: with one per token, that is most of their cost.

    No layer here looks at a body; one that does would have to take this out of the scope.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    def is_clear(self) -> bool:
        """Whether a chunked reply is under way to a client that keeps up."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
            and not cycle.transport.is_closing()
        )

    def put(self, body: bytes) -> None:
        """Write a piece, which is not empty, at once. Only while :meth:`is_clear`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def write(self, body: bytes) -> bool:
        """Write a piece at once; False, and nothing written, when it has to go the long way."""
        if not body or not self.is_clear():
            return False
        self.put(body)
        return True


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have a reply of unknown length end with its connection, not in chunks, which HTTP/1.0 doesn't know and uvicorn sends all the same."""
    send, without_length = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal without_length
        if message["type"] == "http.response.start":
            without_length = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if without_length else None
        elif without_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked


class TimedProtocol(StrictProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        read_timeout_s: float,
        max_connections: int,
        on_made: Callable[[asyncio.Protocol], int],
        on_all_closed: Callable[[], None],
        on_refused: Callable[[int], None],
        on_busy: Callable[[asyncio.Protocol, bool], None],
    ):
        """``on_made(self)`` is told of the connection, and returns how many are open that are not made yet; ``on_all_closed`` is called
        whenever the last open connection has been closed, ``on_refused`` with the status of what no application has answered, ``on_busy(self, whether)``
        when a request is under way here, and when none is any more."""
        super().__init__(config, server_state, app_state, _loop)
        self._read_timeout_s = read_timeout_s
        self._max_connections = max_connections
        self._on_made = on_made
        self._on_all_closed = on_all_closed
        self._on_refused = on_refused
        self._on_busy = on_busy
        self._clock: ReadClock | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) + self._on_made(self) > self._max_connections:
            self.refuse(ApiError(503, f"{self._max_connections} connections are open, the most this server takes", retry_after_s=1))
        else:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        running = self._running
        if running is not None and not running.response_complete:
            # With pipelined requests it is not the newest one, which is all that uvicorn tells.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        # uvicorn leaves it running when the client reset the connection: with that, all of it for as long as the idle may stay.
        self._unset_keepalive_if_required()
        self._on_busy(self, False)
        if not self.connections:
            self._on_all_closed()

    def data_received(self, data: bytes) -> None:
        if self._clock is None:
            self._start_clock()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._clock is None:  # the second of two pipelined requests
            self._start_clock()
        self.scope[READ_CLOCK] = self._clock

    def head_read(self) -> None:
        if self.scope["http_version"] == "1.0":
            end_with_connection(self.cycle)
        self.scope[DIRECT_BODY] = DirectBody(self.cycle)
        self._on_busy(self, True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._on_busy(self, self._running is not None and not self._running.response_complete)

    def request_read(self) -> None:
        if self._clock is not None:
            self._clock.complete = True
        self._stop_clock()

    def refuse(self, error: ApiError) -> None:
        self._on_refused(error.status)
        super().refuse(error)

    def _start_clock(self) -> None:
        self._clock = ReadClock(self.loop.time() + self._read_timeout_s)
        self._alarm = self.loop.call_at(self._clock.deadline + CLOSE_MARGIN_S, self._out_of_time)

    def _stop_clock(self) -> None:
        self._clock = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _out_of_time(self) -> None:
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and not running.response_complete and not running.more_body:
            # A request that was read in time is being answered: what is unfinished is another one behind it.
            self._start_clock()
            return
        waits_for_headers = running is None or running.response_complete
        if waits_for_headers and self.scope is not None and "method" not in self.scope:
            self.refuse(ApiError(408, f"no complete request came within {self._read_timeout_s:g} s"))
        else:
            self.transport.abort()

    @property
    def is_answering(self) -> bool:
        """A reply has begun and has not ended."""
        return self._running is not None and self._running.response_started and not self._running.response_complete
