"""One real API process over a stub engine that replays token ids: everything in front of the engine, and nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq

from fastengine.config import EngineConfig
from fastengine.ipc import channels
from fastengine.ipc.process import tied_to_parent
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.outputs import EngineStatus, OutputBatch, TokenOutput
from fastengine.protocol.requests import AbortRequest, ClientHello, GenerateRequest, IntakeMessage

STOP_TIMEOUT_S = 20.0


@dataclass
class _Running:
    handle: int
    max_tokens: int
    num_prompt: int
    tokens: Iterator[int]
    num_output: int = 0


class StubEngine(threading.Thread):
    """Gives every running sequence one token of ``token_ids`` each ``step_s`` (0: as fast as it can)."""

    def __init__(self, runtime: RuntimeDir, token_ids: Sequence[int], step_s: float):
        super().__init__(daemon=True)
        self.step_s = step_s
        self._token_ids = list(token_ids)
        self._context = zmq.Context()
        self._intake = channels.pull_socket(self._context, runtime.ipc_address(channels.INTAKE))
        self._client = channels.push_socket(self._context, runtime.ipc_address(channels.client_name(0)), hwm=0)
        self._running: dict[int, _Running] = {}
        self._decoder = msgspec.msgpack.Decoder(IntakeMessage)
        self._steps = 0
        self._ended = False

    def end(self) -> None:
        self._ended = True
        self.join()
        self._context.destroy(linger=0)

    def run(self) -> None:
        next_step = time.monotonic()
        while not self._ended:
            wait_ms = max(0.0, next_step - time.monotonic()) * 1000 if self._running else 100.0
            while self._intake.poll(wait_ms):
                self._take(self._decoder.decode(self._intake.recv()))
                wait_ms = 0.0
            if self._running and time.monotonic() >= next_step:
                self._step()
                next_step = time.monotonic() + self.step_s

    def _take(self, message: IntakeMessage) -> None:
        if isinstance(message, ClientHello):
            self._send(EngineStatus(state="ready", progress=1.0, weight_version="v1", num_blocks=1))
        elif isinstance(message, GenerateRequest):
            start = message.handle % len(self._token_ids)
            tokens = itertools.cycle([*self._token_ids[start:], *self._token_ids[:start]])
            max_tokens = message.sampling.max_tokens or 1
            self._running[message.handle] = _Running(message.handle, max_tokens, len(message.prompt_token_ids) // 4, tokens)
        elif isinstance(message, AbortRequest):
            for handle in message.handles:
                self._running.pop(handle, None)

    def _step(self) -> None:
        """As the engine does it: plain tokens in two columns, first and last ones with their details."""
        self._steps += 1
        handles, token_ids, details = [], [], []
        for running in list(self._running.values()):
            running.num_output += 1
            token, first, last = next(running.tokens), running.num_output == 1, running.num_output >= running.max_tokens
            if first or last:
                details.append(self._detail(running, token, first=first, last=last))
            else:
                handles.append(running.handle)
                token_ids.append(token)
            if last:
                del self._running[running.handle]
        self._send(OutputBatch(self._steps, np.array(handles, "<i8").tobytes(), np.array(token_ids, "<i4").tobytes(), details))

    def _detail(self, running: _Running, token: int, *, first: bool, last: bool) -> TokenOutput:
        return TokenOutput(
            handle=running.handle,
            token_ids=[token],
            finish_reason="length" if last else None,
            num_prompt_tokens=running.num_prompt if first else None,
            num_cached_tokens=0 if first else None,
            num_output_tokens=running.num_output if last else None,
            weight_version="v1" if last else None,
        )

    def _send(self, message: OutputBatch | EngineStatus) -> None:
        self._client.send(channels.ENCODER.encode(message))


@dataclass(frozen=True)
class StubServer:
    url: str
    pid: int
    engine: StubEngine | None = None  # None: another project's, which keeps its own pace


@contextlib.contextmanager
def stub_server(model: str, token_ids: Sequence[int]) -> Iterator[StubServer]:
    """The API process of ``fastengine serve`` over a :class:`StubEngine`."""
    config = EngineConfig.from_flags(model=model, load_format="null")
    with tempfile.TemporaryDirectory() as root, socket.create_server(("127.0.0.1", 0)) as listener:
        runtime = RuntimeDir.create(Path(root))
        runtime.file("config.json").write_bytes(config.to_json())
        engine = StubEngine(runtime, token_ids, 0.0)
        engine.start()
        command = [sys.executable, "-m", "fastengine.frontend", "--runtime-dir", str(runtime.path), "--client-index", "0"]
        process = subprocess.Popen(tied_to_parent([*command, "--socket-fd", str(listener.fileno())]), pass_fds=[listener.fileno()])
        try:
            yield StubServer(f"http://127.0.0.1:{listener.getsockname()[1]}", process.pid, engine)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            engine.end()
            runtime.remove()
