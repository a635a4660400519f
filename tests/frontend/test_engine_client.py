"""The ZMQ side: nothing is missed on an edge-triggered descriptor, nothing waits for ever."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fastengine.entrypoints.openai.generation import MAX_SEQUENCES
from fastengine.frontend.engine_client import MAX_UNSENT, MESSAGES_PER_WAKE, EngineClient
from fastengine.frontend.errors import ApiError
from fastengine.ipc import channels
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.control import IsPaused, Pause
from fastengine.protocol.outputs import EngineStatus, OutputBatch
from fastengine.protocol.requests import AbortRequest, GenerateRequest, IntakeMessage, SamplingParams
from tests.frontend.fake_engine import FakeEngine

Test = Callable[[EngineClient, Any], Awaitable[None]]


def with_client(test: Test, *, engine: bool = True) -> None:
    """Run ``test(client, fake engine or runtime directory)``; ``client.batches`` and ``.statuses`` collect."""

    async def run(runtime: RuntimeDir) -> None:
        fake = FakeEngine(runtime) if engine else None
        client = EngineClient(runtime, 0)
        client.batches, client.statuses = [], []
        client.start(on_outputs=client.batches.append, on_status=lambda before, now: client.statuses.append(now))
        try:
            await asyncio.wait_for(test(client, fake or runtime), 20)
        finally:
            client.close()
            if fake is not None:
                fake.stop()

    with tempfile.TemporaryDirectory() as root:
        runtime = RuntimeDir.create(Path(root))
        asyncio.run(run(runtime))
        runtime.remove()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def request(handle: int, size: int = 4) -> GenerateRequest:
    return GenerateRequest(request_id=str(handle), client_index=0, handle=handle, prompt_token_ids=bytes(size), sampling=SamplingParams())


def test_the_hello_is_answered_with_the_status():
    async def test(client, engine):
        assert client.status.state == "starting"
        await until(lambda: client.status.state == "ready")
        assert client.statuses[-1] == client.status
        assert engine.hellos[0].client_index == 0

    with_client(test)


def test_every_message_of_a_burst_arrives_in_order():
    """More messages than one wake takes, in several bursts: an edge that is lost would leave the rest behind."""
    count = MESSAGES_PER_WAKE * 20 + 1

    async def test(client, engine):
        await until(lambda: client.status.state == "ready")
        for burst in range(3):
            first = burst * count
            engine.call(lambda first=first: [engine._send(0, OutputBatch(first + i, b"", b"")) for i in range(count)])
            await until(lambda first=first: len(client.batches) == first + count)
        assert [batch.step_id for batch in client.batches] == list(range(3 * count))

    with_client(test)


def test_single_messages_arrive_while_the_loop_is_otherwise_idle():
    async def test(client, engine):
        await until(lambda: client.status.state == "ready")
        for i in range(200):
            engine.call(lambda i=i: engine._send(0, OutputBatch(i, b"", b"")))
            await until(lambda i=i: len(client.batches) == i + 1)

    with_client(test)


def test_control_calls_are_answered_each_with_its_own():
    async def test(client, engine):
        replies = await asyncio.gather(*(client.control(command, timeout_s=5) for command in (IsPaused(), Pause(), IsPaused())))
        assert [reply.result for reply in replies] == [{"is_paused": False}, {}, {"is_paused": True}]

    with_client(test)


def test_control_past_its_deadline_is_a_504_naming_the_command():
    async def test(client, engine):
        engine.silent_control = True
        with pytest.raises(ApiError) as late:
            await client.control(IsPaused(), timeout_s=0.05)
        assert late.value.status == 504
        assert "is_paused" in late.value.message
        assert not client._pending

    with_client(test)


def test_a_failed_engine_ends_commands_at_once_and_is_greeted_again():
    async def test(client, engine):
        await until(lambda: client.status.state == "ready")
        engine.silent_control = True
        call = asyncio.create_task(client.control(IsPaused(), timeout_s=60))
        await until(lambda: bool(engine.commands))
        engine.set_state("failed", "killed")
        with pytest.raises(ApiError) as failed:
            await call
        assert failed.value.status == 503
        assert "killed" in failed.value.message
        with pytest.raises(ApiError):
            await client.control(IsPaused(), timeout_s=60)
        await until(lambda: len(engine.hellos) == 2)

    with_client(test)


def test_requests_wait_for_room_up_to_a_bound_and_aborts_past_it():
    """No engine reads: socket and queue fill, requests get 503; when one reads at last, all that was taken comes in order."""

    async def test(client, runtime):
        # The most that one request may bring is taken whole, and others beside it.
        client.submit([request(i) for i in range(MAX_SEQUENCES)])
        sent = MAX_SEQUENCES

        def fill() -> None:
            nonlocal sent
            while sent < 4 * MAX_UNSENT:
                client.submit([request(sent)])
                sent += 1

        with pytest.raises(ApiError) as refused:
            fill()
        assert refused.value.status == 503
        assert MAX_SEQUENCES < sent <= channels.SEND_HWM + MAX_UNSENT + 1
        client.abort([1, 2])
        client.abort([3], "stop")
        context = zmq.Context()
        reader = channels.pull_socket(context, runtime.ipc_address(channels.INTAKE))
        messages: list[IntakeMessage] = []

        def read() -> bool:
            while reader.poll(0):
                messages.append(msgspec.msgpack.decode(reader.recv(), type=IntakeMessage))
            return sum(isinstance(message, AbortRequest) for message in messages) == 2

        await until(read)
        assert messages[-2:] == [AbortRequest(0, [1, 2], "abort"), AbortRequest(0, [3], "stop")]
        assert len(messages) == sent + 3
        assert [message.handle for message in messages if isinstance(message, GenerateRequest)] == list(range(sent))
        assert not client._unsent
        reader.close()
        context.term()

    with_client(test, engine=False)


def test_a_message_that_cannot_be_decoded_does_not_stop_the_others():
    async def test(client, engine):
        await until(lambda: client.status.state == "ready")
        engine.call(lambda: engine._clients[0].send(b"\xc1garbage"))
        engine.call(lambda: engine._send(0, OutputBatch(9, b"", b"")))
        await until(lambda: len(client.batches) == 1)

    with_client(test)


def test_statuses_from_the_supervisor_count_like_the_engines():
    async def test(client, runtime):
        context = zmq.Context()
        supervisor = channels.push_socket(context, runtime.ipc_address(channels.client_name(0)))
        supervisor.send(channels.ENCODER.encode(EngineStatus(state="failed", message="exit code 3")))
        await until(lambda: client.status.state == "failed")
        supervisor.close()
        context.term()

    with_client(test, engine=False)
