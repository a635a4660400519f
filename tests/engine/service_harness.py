"""A real EngineService in a thread, with ranks that are processes but no Paddle, and the client it talks to."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fastengine.config import EngineConfig
from fastengine.engine.core import ModelLimits
from fastengine.engine.launcher import WorkerGroup
from fastengine.engine.service import EngineService
from fastengine.ipc.channels import CONTROL, ENCODER, INTAKE, client_name, pull_socket, push_socket
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.control import ControlCommand, ControlRequest, ControlResponse, GetMetrics, ToClient
from fastengine.protocol.outputs import EngineStatus, OutputBatch, TokenOutput
from fastengine.protocol.requests import AbortRequest, ClientHello, GenerateRequest, SamplingParams
from fastengine.protocol.tokens import pack_token_ids, unpack_columns
from tests.engine.driver import MAX_MODEL_LEN, Received, make_config
from tests.engine.fake_worker import EOS, VOCAB

FAKE_RANKS = Path(__file__).with_name("fake_ranks.py")
CLIENT = 0
PATIENCE_S = 60.0


class FakeRanksGroup(WorkerGroup):
    def launch_command(self, runtime_dir: Path) -> list[str]:
        command = [sys.executable, str(FAKE_RANKS), "--runtime-dir", str(runtime_dir), "--generation", str(self.generation)]
        return [*command, "--log-dir", str(self.log_dir), "--num-ranks", str(self.num_ranks)]

    def wait_for_ranks(self, timeout_s: float = 0.5) -> None:
        super().wait_for_ranks(timeout_s)  # they have nothing to put in order; one that hangs is waited for in vain


class ServiceHarness:
    """The service and its one client. ``pump`` handles messages until something is true."""

    def __init__(self, runtime: RuntimeDir, config: EngineConfig):
        self.config = config
        self.statuses: list[EngineStatus] = []
        self.received: dict[int, Received] = {}
        self.responses: list[ControlResponse] = []
        self.error: BaseException | None = None
        self._context = zmq.Context()
        self._inbox = pull_socket(self._context, runtime.ipc_address(client_name(CLIENT)))
        self._intake = push_socket(self._context, runtime.ipc_address(INTAKE))
        self._control = push_socket(self._context, runtime.ipc_address(CONTROL))
        self._decode = msgspec.msgpack.Decoder(ToClient).decode
        self.service = EngineService(config, runtime, ModelLimits(MAX_MODEL_LEN, VOCAB, (EOS,)), lambda status: None, FakeRanksGroup)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self._intake.send(ENCODER.encode(ClientHello(CLIENT, 0)))

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def add(self, prompt: list[int], request_id: str = "", **sampling: Any) -> Received:
        handle = len(self.received) + 1
        request = GenerateRequest(
            request_id=request_id or f"r{handle}",
            client_index=CLIENT,
            handle=handle,
            prompt_token_ids=pack_token_ids(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        )
        self.received[handle] = Received(request)
        self._intake.send(ENCODER.encode(request))
        return self.received[handle]

    def abort(self, one: Received) -> None:
        one.gone = True
        self._intake.send(ENCODER.encode(AbortRequest(CLIENT, [one.request.handle])))

    def call(self, command: ControlCommand) -> ControlResponse:
        request_id = f"control-{len(self.responses)}"
        self._control.send(ENCODER.encode(ControlRequest(request_id=request_id, client_index=CLIENT, command=command)))
        self.pump(lambda: bool(self.responses) and self.responses[-1].request_id == request_id)
        return self.responses[-1]

    def metric(self, name: str) -> float:
        lines = self.call(GetMetrics()).result["text"].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"fastengine:{name}{{"))

    def pump(self, until: Callable[[], bool], what: str = "what the test waits for", patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not until():
            assert time.monotonic() < deadline, f"{what} did not happen; statuses: {self.statuses}"
            assert self.thread.is_alive() or self.error is not None, "the service ended"
            if self._inbox.poll(100):
                self._take(self._decode(self._inbox.recv()))

    def finish(self) -> None:
        """Until every request has ended."""
        self.pump(lambda: all(one.finish_reason is not None for one in self.received.values()), "the end of all requests")

    def wait_state(self, state: str) -> None:
        self.pump(lambda: any(status.state == state for status in self.statuses), f"the state {state}")

    def _take(self, message: OutputBatch | EngineStatus | ControlResponse) -> None:
        if isinstance(message, EngineStatus):
            self.statuses.append(message)
        elif isinstance(message, ControlResponse):
            self.responses.append(message)
        else:
            for handle, tokens in unpack_columns(message.handles, message.token_ids, message.num_steps):
                for token in tokens:
                    self.received[handle].add_plain(token)
            for output in message.details:
                assert isinstance(output, TokenOutput)
                self.received[output.handle].add(output)

    def hang_up(self) -> None:
        """Read no more: what the service still sends finds nobody."""
        self._inbox.close()

    def stop(self) -> None:
        self.service.request_stop(0.0)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def running_service(root: Path, **flags: Any) -> Iterator[ServiceHarness]:
    runtime = RuntimeDir.create(root)
    config = make_config(**{"num_gpu_blocks_override": 100, **flags})
    runtime.file("config.json").write_bytes(config.to_json())
    harness = ServiceHarness(runtime, config)
    try:
        yield harness
    finally:
        harness.stop()
        runtime.remove()
