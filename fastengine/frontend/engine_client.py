"""The ZMQ side of an API process, on its asyncio loop.

The incoming socket's descriptor is watched by the loop itself. It is edge-triggered: it becomes
readable when the socket's state *may* have changed and stays silent until then, so each wake drains
the socket until it is empty, or calls itself again when it stopped early.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import zmq

from fastengine.frontend.errors import ApiError, engine_unavailable
from fastengine.ipc import channels
from fastengine.ipc.life_signs import LifeSigns, api_place
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.control import ControlCommand, ControlRequest, ControlResponse, PrepareGrammar, ToClient
from fastengine.protocol.outputs import EngineStatus, OutputBatch
from fastengine.protocol.requests import AbortRequest, ClientHello, GenerateRequest, GrammarSpec, IntakeMessage
from fastengine.protocol.supervision import ClientCheck

logger = logging.getLogger(__name__)
# Messages taken per wake before other callbacks of the loop get their turn.
MESSAGES_PER_WAKE = 64
READABLE = int(zmq.POLLIN)
# Messages that may wait here for room in the engine's socket before requests are refused. One request may have as many
# sequences as the socket has places: it is taken whole, and those beside it are taken as well.
MAX_UNSENT = channels.SEND_HWM
# How long closing may take to get the last aborts to the engine.
CLOSE_LINGER_MS = 200
GRAMMAR_TIMEOUT_S = 60.0
_DECODER = msgspec.msgpack.Decoder(ToClient | ClientCheck)


class EngineClient:
    """Sends requests and commands to the engine; hands on what it answers.

    Owns the three sockets, the engine's last status and the commands that wait for an answer; knows
    nothing of requests. Everything runs on the loop that called :meth:`start`.
    """

    def __init__(self, runtime_dir: RuntimeDir, client_index: int, num_api_processes: int = 1):
        self.client_index = client_index
        self._num_api_processes = num_api_processes
        self._life_signs: LifeSigns | None = None  # opened for the supervisor's first check
        self.status = EngineStatus(state="starting", message="waiting for the engine process")
        self.runtime_dir = runtime_dir
        self._pending: dict[str, asyncio.Future[ControlResponse]] = {}
        self._unsent: deque[bytes] = deque()

    def start(self, *, on_outputs: Callable[[OutputBatch], None], on_status: Callable[[EngineStatus, EngineStatus], None]) -> None:
        """Open the sockets and greet the engine. ``on_status`` gets (before, now)."""
        self._on_outputs, self._on_status = on_outputs, on_status
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        address = self.runtime_dir.ipc_address
        self._incoming = channels.pull_socket(self._context, address(channels.client_name(self.client_index)))
        self._intake = channels.push_socket(self._context, address(channels.INTAKE))
        self._control = channels.push_socket(self._context, address(channels.CONTROL))
        self._greeted = asyncio.Event()
        self._loop.add_reader(self._incoming.fileno(), self._drain)
        self._greet()
        self._drain()

    def close(self) -> None:
        """Leave the loop and close the sockets; commands that still wait are cancelled."""
        self._loop.remove_reader(self._incoming.fileno())
        if self._unsent:
            self._loop.remove_reader(self._intake.fileno())
        for future in self._pending.values():
            future.cancel()
        self._context.destroy(linger=CLOSE_LINGER_MS)
        if self._life_signs is not None:
            self._life_signs.close()

    # -- to the engine ------------------------------------------------------------------------

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Send them in order, all or none. Raises ApiError 503 when the engine has not taken what was sent before."""
        if len(self._unsent) > MAX_UNSENT:
            raise engine_unavailable("the engine does not take requests at the moment", retry_after_s=1)
        for request in requests:
            self._post(request)

    def abort(self, handles: list[int], reason: Literal["abort", "stop"] = "abort") -> None:
        """Stop these sequences. Never refused: what the socket does not take now goes when it does.

        After :meth:`close` it does nothing: the engine outlives no client for long.
        """
        if self._context.closed:
            return
        self._post(AbortRequest(self.client_index, handles, reason))

    def fail_commands(self, error: ApiError) -> int:
        """Have every command that waits for an answer raise ``error``; how many there were."""
        waiting = [future for future in self._pending.values() if not future.done()]
        for future in waiting:
            future.set_exception(error)
        return len(waiting)

    async def control(self, command: ControlCommand, *, timeout_s: float) -> ControlResponse:
        """Ask the engine loop. Raises ApiError 504 past ``timeout_s`` and 503 when there is no engine."""
        if self.status.state == "failed":
            raise engine_unavailable(f"the engine has failed: {self.status.message}")
        request_id = uuid.uuid4().hex
        future: asyncio.Future[ControlResponse] = self._loop.create_future()
        self._pending[request_id] = future
        name = type(command).__struct_config__.tag
        try:
            message = ControlRequest(request_id=request_id, client_index=self.client_index, command=command)
            return await asyncio.wait_for(self._ask(message, future), timeout_s)
        except zmq.Again:
            raise engine_unavailable(f"the engine does not take commands at the moment ({name})") from None
        except asyncio.TimeoutError:
            raise ApiError(504, f"the engine did not answer {name} within {timeout_s:g} s") from None
        finally:
            del self._pending[request_id]

    async def prepare_grammar(self, grammar: GrammarSpec) -> None:
        """Return when every rank has compiled it. Raises ApiError: 400 when that can't be, 503 without workers, 504."""
        reply = await self.control(PrepareGrammar(grammar), timeout_s=GRAMMAR_TIMEOUT_S)
        if reply.error is not None:
            raise ApiError.from_engine(reply.error)

    async def _ask(self, message: ControlRequest, answer: asyncio.Future[ControlResponse]) -> ControlResponse:
        # Commands travel on another socket than the greeting, and only who has been greeted is answered.
        await self._greeted.wait()
        self._control.send(channels.ENCODER.encode(message), zmq.NOBLOCK)
        return await answer

    def _send(self, message: IntakeMessage) -> None:
        self._intake.send(channels.ENCODER.encode(message), zmq.NOBLOCK)

    def _greet(self) -> None:
        """Tell the engine who this is; it answers with its status."""
        try:
            self._send(ClientHello(self.client_index, os.getpid()))
        except zmq.Again:
            logger.error("the engine's socket is full: the greeting is lost")

    def _post(self, message: IntakeMessage) -> None:
        """Send it behind all that was sent before, now or once the socket has room."""
        self._unsent.append(channels.ENCODER.encode(message))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._intake.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            self._loop.add_reader(self._intake.fileno(), self._intake_changed)
            # The edge may have passed between the failed send and the watch.
            self._loop.call_soon(self._intake_changed)

    def _intake_changed(self) -> None:
        if int(self._intake.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            self._loop.remove_reader(self._intake.fileno())
            self._flush()

    # -- from the engine ----------------------------------------------------------------------

    def _drain(self) -> None:
        if self._incoming.closed:
            return
        incoming = self._incoming
        for _ in range(MESSAGES_PER_WAKE):
            try:
                data = incoming.recv(zmq.NOBLOCK)
            except zmq.Again:  # the descriptor tells of other changes, too
                return
            self._take(data)
            # Asked instead of tried in vain: the exception takes ten times as long.
            if incoming.closed or not int(incoming.get(zmq.EVENTS)) & READABLE:
                return
        self._loop.call_soon(self._drain)

    def _take(self, data: bytes) -> None:
        try:
            message = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            logger.error("dropped a message from the engine that can't be decoded: %s", error)
            return
        if isinstance(message, OutputBatch):
            self._on_outputs(message)
        elif isinstance(message, EngineStatus):
            self._status_changed(message)
        elif isinstance(message, ClientCheck):
            self._answer(message)
        else:
            future = self._pending.get(message.request_id)
            if future is not None and not future.done():
                future.set_result(message)

    def _answer(self, check: ClientCheck) -> None:
        if self._life_signs is None:
            self._life_signs = LifeSigns(self.runtime_dir, self._num_api_processes)
        self._life_signs.answer(api_place(self.client_index), check.number)

    def _status_changed(self, status: EngineStatus) -> None:
        before, self.status = self.status, status
        if status.state == "failed":
            self.fail_commands(engine_unavailable(f"the engine has failed: {status.message}"))
            self._greeted.clear()
            if before.state != "failed":
                self._greet()  # waits in the socket for an engine that may be started in its place
        else:
            self._greeted.set()
        self._on_status(before, status)
