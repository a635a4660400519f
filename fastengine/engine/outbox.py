"""What leaves the engine for the API processes: one socket each, never a wait.

A process that does not read (stopped, swapped out) has its messages kept up to a bound; past it the
process counts as dead and its requests are aborted, so that it can't hold memory or blocks for ever.
"""

from __future__ import annotations

import logging
from collections import deque

import zmq

from fastengine.ipc.channels import ENCODER, client_name, push_socket
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.control import ControlResponse
from fastengine.protocol.outputs import EngineStatus, OutputBatch

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 64 << 20
# While a backlog exists, how soon to try again when nothing else wakes the loop.
RETRY_S = 0.02
# What API processes that live get to read an ending engine's last words.
LAST_WORDS_MS = 500


class _Client:
    def __init__(self, socket: zmq.Socket):
        self.socket = socket
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0


class Outbox:
    """Sockets to the API processes by client index. Used by the engine loop only."""

    def __init__(self, runtime: RuntimeDir):
        self._runtime = runtime
        self._context = zmq.Context()
        self._clients: dict[int, _Client] = {}

    @property
    def clients(self) -> list[int]:
        return list(self._clients)

    @property
    def has_backlog(self) -> bool:
        for client in self._clients.values():  # noqa: SIM110 - each turn asks, and a generator takes several times as long
            if client.backlog:
                return True
        return False

    def open(self, index: int) -> None:
        """(Re)connect to a client that has said hello; what its predecessor had not read is dropped."""
        self.drop(index)
        address = self._runtime.ipc_address(client_name(index))
        self._clients[index] = _Client(push_socket(self._context, address))

    def drop(self, index: int) -> None:
        client = self._clients.pop(index, None)
        if client is not None:
            client.socket.close()

    def send(self, index: int, message: OutputBatch | EngineStatus | ControlResponse) -> bool:
        """Queue one message. False when the client is unknown or hopelessly behind (it is dropped then)."""
        client = self._clients.get(index)
        if client is None:
            return False
        encoded = ENCODER.encode(message)
        client.backlog.append(encoded)
        client.backlog_bytes += len(encoded)
        self._flush_client(client)
        if client.backlog_bytes > MAX_BACKLOG_BYTES:
            logger.error("API process %d has not read %d MiB of outputs: its requests are aborted", index, client.backlog_bytes >> 20)
            self.drop(index)
            return False
        return True

    def broadcast(self, message: EngineStatus) -> None:
        for index in self.clients:
            self.send(index, message)

    def flush(self) -> None:
        for client in self._clients.values():
            self._flush_client(client)

    def _flush_client(self, client: _Client) -> None:
        while client.backlog:
            try:
                client.socket.send(client.backlog[0], zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            client.backlog_bytes -= len(client.backlog.popleft())

    def close(self, *, nobody_reads: bool = False) -> None:
        """``nobody_reads``: every client has ended, and a socket would look for them in vain for the time that last words get."""
        for client in self._clients.values():
            client.socket.close(linger=0 if nobody_reads else LAST_WORDS_MS)
        self._clients.clear()
        self._context.term()
