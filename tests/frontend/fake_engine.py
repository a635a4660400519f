"""An engine that speaks the protocol over ZMQ and generates what a script says: everything but a model.

It runs in a thread of its own. Without further ado it answers a prompt by repeating it, token for token
(``echo_script``), one token per step, as fast as it can or with a pause between steps.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from fastengine.ipc import channels
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol import control
from fastengine.protocol.control import ControlRequest, ControlResponse
from fastengine.protocol.outputs import EngineError, EngineStatus, OutputBatch, TokenOutput, TopLogprobs
from fastengine.protocol.requests import AbortRequest, ClientGone, ClientHello, GenerateRequest, IntakeMessage
from fastengine.protocol.tokens import unpack_token_ids

Script = Callable[[GenerateRequest], Iterable[int]]


def echo_script(request: GenerateRequest) -> Iterator[int]:
    """The prompt's tokens again and again."""
    return itertools.cycle(unpack_token_ids(request.prompt_token_ids).tolist())


@dataclass
class Running:
    request: GenerateRequest
    tokens: Iterator[int]
    num_output: int = 0


@dataclass
class FakeEngine:
    """``step_s`` is the pause between steps. ``eos`` ends a sequence. What came is kept in the lists below."""

    runtime: RuntimeDir
    script: Script = echo_script
    eos: int | None = None
    step_s: float = 0.0
    state: str = "ready"
    refuse: EngineError | None = None  # every request is answered with it
    silent_control: bool = False
    generated: list[GenerateRequest] = field(default_factory=list)
    aborts: list[AbortRequest] = field(default_factory=list)
    commands: list[ControlRequest] = field(default_factory=list)
    hellos: list[ClientHello] = field(default_factory=list)
    paused: bool = False

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._intake = channels.pull_socket(self._context, self.runtime.ipc_address(channels.INTAKE))
        self._control = channels.pull_socket(self._context, self.runtime.ipc_address(channels.CONTROL))
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(self._wake_address)
        self._wake_out = self._context.socket(zmq.PUSH)
        self._wake_out.connect(self._wake_address)
        self._clients: dict[int, zmq.Socket] = {}
        self._running: dict[tuple[int, int], Running] = {}
        self._calls: list[Callable[[], None]] = []
        self._stopped = False
        self._step = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- for tests, from another thread -----------------------------------------------------------

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the engine's thread and wait for it."""
        done = threading.Event()
        self._calls.append(lambda: (function(), done.set()))  # type: ignore[func-returns-value]
        self._wake_out.send(b"")
        assert done.wait(5)

    def set_state(self, state: str, message: str = "", **changes: Any) -> None:
        def change() -> None:
            self.state = state
            for name, value in changes.items():
                setattr(self, name, value)
            for index in self._clients:
                self._send(index, self._status(message))

        self.call(change)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Until ``condition`` holds; it is looked at after everything the engine does."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "the fake engine never came to the expected state"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def aborted_handles(self) -> list[int]:
        return [handle for abort in self.aborts for handle in abort.handles]

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._wake_out.send(b"")
            self._thread.join(5)
            self._context.destroy(linger=0)

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._control, self._intake, self._wake_in):
            poller.register(socket, zmq.POLLIN)
        next_step = 0.0
        while not self._stopped:
            busy = bool(self._running) and not self.paused
            wait_ms = max(0.0, next_step - time.monotonic()) * 1000 if busy else None
            ready = dict(poller.poll(wait_ms))
            if self._wake_in in ready:
                self._wake_in.recv()
                while self._calls:
                    self._calls.pop(0)()
            if self._control in ready:
                self._take_command(msgspec.msgpack.decode(self._control.recv(), type=ControlRequest))
            if self._intake in ready:
                self._take(msgspec.msgpack.decode(self._intake.recv(), type=IntakeMessage))
            if busy and time.monotonic() >= next_step:
                self.step()
                next_step = time.monotonic() + self.step_s
            with self._changed:
                self._changed.notify_all()

    def _take(self, message: IntakeMessage) -> None:
        if isinstance(message, ClientHello):
            self.hellos.append(message)
            address = self.runtime.ipc_address(channels.client_name(message.client_index))
            self._clients[message.client_index] = channels.push_socket(self._context, address)
            self._send(message.client_index, self._status())
        elif isinstance(message, GenerateRequest):
            self.generated.append(message)
            if self.refuse is not None:
                output = TokenOutput(handle=message.handle, finish_reason="error", error=self.refuse)
                self._send(message.client_index, OutputBatch(0, b"", b"", [output]))
            else:
                self._running[message.client_index, message.handle] = Running(message, iter(self.script(message)))
        elif isinstance(message, AbortRequest):
            self.aborts.append(message)
            for handle in message.handles:
                self._running.pop((message.client_index, handle), None)
        elif isinstance(message, ClientGone):
            self._clients.pop(message.client_index).close(0)

    def step(self) -> None:
        """One token for every running sequence: plain ones in the columns, the others in details."""
        self._step += 1
        batches: dict[int, tuple[list[int], list[int], list[TokenOutput]]] = {}
        for key, running in list(self._running.items()):
            handles, token_ids, details = batches.setdefault(key[0], ([], [], []))
            output = self._next(running)
            if output.finish_reason is None and output.num_prompt_tokens is None and output.logprobs is None:
                handles.append(output.handle)
                token_ids.append(output.token_ids[0])
            else:
                details.append(output)
            if output.finish_reason is not None:
                del self._running[key]
        for index, (handles, token_ids, details) in batches.items():
            self._send(index, OutputBatch(self._step, np.array(handles, "<i8").tobytes(), np.array(token_ids, "<i4").tobytes(), details))

    def _next(self, running: Running) -> TokenOutput:
        request, sampling = running.request, running.request.sampling
        token = next(running.tokens)
        running.num_output += 1
        stop = not sampling.ignore_eos and (token == self.eos or token in sampling.stop_token_ids)
        length = sampling.max_tokens is not None and running.num_output >= sampling.max_tokens
        first = running.num_output == 1
        prompt = unpack_token_ids(request.prompt_token_ids).tolist()
        return TokenOutput(
            handle=request.handle,
            token_ids=[token],
            finish_reason="stop" if stop else "length" if length else None,
            stop_token_id=token if stop else None,
            logprobs=None if sampling.logprobs is None else [fake_logprobs(token, sampling.logprobs)],
            prompt_logprobs=[None, *(fake_logprobs(t, sampling.prompt_logprobs) for t in prompt[1:])]
            if first and sampling.prompt_logprobs is not None
            else None,
            num_prompt_tokens=len(prompt) if first else None,
            num_cached_tokens=len(prompt) // 2 if first else None,
            num_output_tokens=running.num_output if stop or length else None,
            weight_version="v1" if stop or length else None,
        )

    def _take_command(self, request: ControlRequest) -> None:
        self.commands.append(request)
        if self.silent_control:
            return
        command, result, error = request.command, {}, None
        if isinstance(command, control.Pause | control.Resume):
            self.paused = isinstance(command, control.Pause)
            self._end_all("abort") if self.paused and command.mode == "abort" else None
            self._send(request.client_index, self._status())
        elif isinstance(command, control.IsPaused):
            result = {"is_paused": self.paused}
        elif isinstance(command, control.UpdateWeights) and not self.paused and command.stop_first is None:
            error = EngineError(409, "the engine is not paused")
        elif isinstance(command, control.AbortRequests):
            result = self._abort_by_id(command)
        elif isinstance(command, control.GetMetrics):
            result = {"text": f"fastengine:num_requests_running {len(self._running)}\n"}
        elif isinstance(command, control.GetServerInfo):
            result = {"version": "1", "workers": {"device": "cpu", "compiled_ops": {"rms_norm": "compiled"}}}
        self._send(request.client_index, ControlResponse(request_id=request.request_id, result=result, error=error))

    def _abort_by_id(self, command: control.AbortRequests) -> dict[str, Any]:
        aborted, missing = [], set(command.req_ids)
        for key, running in list(self._running.items()):
            names = {running.request.request_id, running.request.parent_id}
            if command.abort_all or names & set(command.req_ids):
                missing -= names
                aborted.append({"request_id": running.request.request_id, "num_output_tokens": running.num_output})
                self._end(key, "abort")
        return {"aborted": aborted, "not_found": sorted(missing)}

    def _end_all(self, reason: str) -> None:
        for key in list(self._running):
            self._end(key, reason)

    def _end(self, key: tuple[int, int], reason: Any) -> None:
        running = self._running.pop(key)
        output = TokenOutput(handle=key[1], finish_reason=reason, num_output_tokens=running.num_output)
        self._send(key[0], OutputBatch(self._step, b"", b"", [output]))

    def fail_request(self, error: EngineError) -> None:
        """End the one running request with ``error``."""

        def fail() -> None:
            key = next(iter(self._running))
            del self._running[key]
            self._send(key[0], OutputBatch(self._step, b"", b"", [TokenOutput(handle=key[1], finish_reason="error", error=error)]))

        self.call(fail)

    def _status(self, message: str = "") -> EngineStatus:
        return EngineStatus(state=self.state, message=message, progress=1.0, paused=self.paused, weight_version="v1", num_blocks=64)  # type: ignore[arg-type]

    def _send(self, index: int, message: Any) -> None:
        self._clients[index].send(channels.ENCODER.encode(message))


def fake_logprobs(token: int, num_top: int) -> TopLogprobs:
    """The token itself is the most likely; the next ones follow it in the vocabulary."""
    ids = [(token + i) % 256 for i in range(num_top)]
    return TopLogprobs(-0.25, 1, ids, [-0.25 * (i + 1) for i in range(num_top)])
