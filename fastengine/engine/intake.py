"""The intake thread: receives what API processes send and hands it to the engine loop.

Two sockets, so that an operator's command never queues behind a thousand generate requests. The thread
blocks on both; the loop takes everything that has come in one call and was woken by its bell.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

import msgspec
import zmq

from fastengine.ipc.channels import CONTROL, INTAKE, pull_socket
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell
from fastengine.observability.watchdog import ThreadWatchdog
from fastengine.protocol.control import ControlRequest
from fastengine.protocol.requests import IntakeMessage

logger = logging.getLogger(__name__)

# Messages the loop has not taken yet. When it is that far behind, the sockets' own buffers fill next.
MAX_PENDING = 65_536


class IntakeFailed(RuntimeError):
    """The thread that receives messages has died; the cause is the exception's."""


class IntakeThread:
    """Owns the two sockets and the queues between its thread and the loop."""

    def __init__(self, runtime: RuntimeDir, bell: EngineBell, watchdog: ThreadWatchdog):
        self._bell = bell
        self._watchdog = watchdog
        self._context = zmq.Context()
        self._intake = pull_socket(self._context, runtime.ipc_address(INTAKE))
        self._control = pull_socket(self._context, runtime.ipc_address(CONTROL))
        self._requests: deque[IntakeMessage] = deque()
        self._commands: deque[ControlRequest] = deque()
        self._room = threading.Semaphore(MAX_PENDING)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_news(self) -> bool:
        return bool(self._requests or self._commands)

    def take_requests(self) -> list[IntakeMessage]:
        """Everything received so far, in order of arrival. Raises IntakeFailed when the thread has died."""
        if self._failure is not None:
            raise IntakeFailed("the intake thread has died") from self._failure
        return self._take(self._requests)

    def take_commands(self) -> list[ControlRequest]:
        return self._take(self._commands)

    def _take(self, queue: deque) -> list:
        taken: list = []
        if not queue:
            return taken
        with contextlib.suppress(IndexError):
            while True:
                taken.append(queue.popleft())
        if taken:
            self._room.release(len(taken))
        return taken

    def _run(self) -> None:
        try:
            self._receive()
        except zmq.ContextTerminated:
            pass
        except Exception as error:  # noqa: BLE001 - handed to the loop, which ends the engine
            self._failure = error
            self._bell.ring()
        finally:
            self._intake.close()
            self._control.close()

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._intake, zmq.POLLIN)
        intake_decoder = msgspec.msgpack.Decoder(IntakeMessage)
        control_decoder = msgspec.msgpack.Decoder(ControlRequest)
        while True:
            ready = dict(poller.poll())
            with self._watchdog:
                if self._control in ready:
                    self._drain(self._control, control_decoder, self._commands)
                if self._intake in ready:
                    self._drain(self._intake, intake_decoder, self._requests)

    def _drain(self, socket: zmq.Socket, decoder: msgspec.msgpack.Decoder, queue: deque) -> None:
        for _ in range(256):  # then look at the control socket again
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                decoded = decoder.decode(message)
            except msgspec.DecodeError:
                # Only our own processes reach these sockets: this is a version mix-up, not user input.
                logger.exception("dropped a message of %d bytes that this version can't read", len(message))
                continue
            if not self._room.acquire(blocking=False):
                self._watchdog.disarm()  # the loop is behind: that is its own watchdog's business
                self._room.acquire()
                self._watchdog.arm()
            queue.append(decoded)
        self._bell.ring()

    def close(self) -> None:
        self._room.release(MAX_PENDING)  # a thread that waits for room ends, too
        self._context.term()
        self._thread.join(timeout=5)
        self._watchdog.close()
