"""Round trip of a step between engine and worker, through the rings and through what others use.

    python benchmarks/bench_ipc.py [--rounds 3000]

One process plays the engine, a child plays a worker rank that answers every plan with a result at once.
Four carriers take turns in one run (A B C D, A B C D, ...):

- ``rings``: fastengine's shared-memory rings and bells, plan and result encoded and decoded as in service;
- ``managers.Queue``: two ``multiprocessing.managers`` queues, which FastDeploy's task queue is built on;
- ``mp.Queue``: two plain ``multiprocessing`` queues;
- ``zmq ipc``: a PAIR socket.

All but the rings pickle nothing here either: they carry the same encoded bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import numpy as np
import zmq

from fastengine.ipc.channels import ENCODER
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell, EngineEnd, WorkerEnd
from fastengine.protocol.steps import FromWorker, StepPlan, StepResult, ToWorker

RoundTrip = Callable[[bytes], bytes]
ANSWER_TIMEOUT_S = 10.0


def plan_of(num_requests: int) -> StepPlan:
    slots = np.arange(num_requests, dtype=np.int32).tobytes()
    return StepPlan(step_id=1, decodes=slots, grown_slots=slots[: num_requests // 4], grown_blocks=slots[: num_requests // 4])


def answer(message: bytes) -> bytes:
    plan = msgspec.msgpack.decode(message, type=ToWorker)
    assert isinstance(plan, StepPlan)
    return ENCODER.encode(StepResult(step_id=plan.step_id, slots=plan.decodes, token_ids=plan.decodes))


def _forked(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def rings() -> Iterator[RoundTrip]:
    runtime = RuntimeDir.create()
    bell, engine = EngineBell(runtime.path), EngineEnd(runtime.path, 0, 1)

    def rank() -> None:
        worker = WorkerEnd(runtime.path, 0, 0, 1)
        worker.send(b"ready")
        while (message := worker.receive(ANSWER_TIMEOUT_S)) != b"stop":
            if message is not None:
                worker.send(answer(message))

    def receive() -> bytes:
        while True:
            if got := engine.receive():
                return got[0][1]
            if engine.look():
                continue
            bell.wait(ANSWER_TIMEOUT_S)
            bell.clear()
            engine.woken()

    def round_trip(message: bytes) -> bytes:
        engine.publish(message)
        return receive()

    pid = _forked(rank)
    receive()
    yield round_trip
    engine.publish(b"stop")
    os.waitpid(pid, 0)
    engine.close()
    bell.close()
    runtime.remove()


class _Manager(BaseManager):
    pass


QUEUES: dict[str, Queue[bytes]] = {"plans": Queue(), "results": Queue()}


def _queue(name: str) -> Queue[bytes]:
    return QUEUES[name]


_Manager.register("queue", callable=_queue)


@contextlib.contextmanager
def manager_queues() -> Iterator[RoundTrip]:
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "manager")
        manager = _Manager(address=address, authkey=b"bench")
        manager.start()

        def rank() -> None:
            client: Any = _Manager(address=address, authkey=b"bench")
            client.connect()
            plans, results = client.queue("plans"), client.queue("results")
            while (message := plans.get()) != b"stop":
                results.put(answer(message))

        pid = _forked(rank)
        client: Any = _Manager(address=address, authkey=b"bench")
        client.connect()
        plans, results = client.queue("plans"), client.queue("results")

        def round_trip(message: bytes) -> bytes:
            plans.put(message)
            return results.get()

        yield round_trip
        plans.put(b"stop")
        os.waitpid(pid, 0)
        manager.shutdown()


@contextlib.contextmanager
def mp_queues() -> Iterator[RoundTrip]:
    context = mp.get_context("fork")
    plans, results = context.Queue(), context.Queue()

    def rank() -> None:
        while (message := plans.get()) != b"stop":
            results.put(answer(message))

    process = context.Process(target=rank)
    process.start()

    def round_trip(message: bytes) -> bytes:
        plans.put(message)
        return results.get(timeout=ANSWER_TIMEOUT_S)

    yield round_trip
    plans.put(b"stop")
    process.join()


@contextlib.contextmanager
def zmq_pair() -> Iterator[RoundTrip]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/pair"

        def rank() -> None:
            socket = zmq.Context().socket(zmq.PAIR)
            socket.connect(address)
            while (message := socket.recv()) != b"stop":
                socket.send(answer(message))

        pid = _forked(rank)
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        socket.bind(address)

        def round_trip(message: bytes) -> bytes:
            socket.send(message)
            return socket.recv()

        yield round_trip
        socket.send(b"stop")
        os.waitpid(pid, 0)
        context.destroy(linger=100)


CARRIERS: dict[str, Callable[[], contextlib.AbstractContextManager[RoundTrip]]] = {
    "rings": rings,
    "managers.Queue": manager_queues,
    "mp.Queue": mp_queues,
    "zmq ipc": zmq_pair,
}


def measure(round_trip: RoundTrip, plan: StepPlan, rounds: int) -> list[float]:
    """Microseconds of each round trip, encoding and decoding on both sides included."""
    decode = msgspec.msgpack.Decoder(FromWorker).decode
    for _ in range(100):
        round_trip(ENCODER.encode(plan))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        decode(round_trip(ENCODER.encode(plan)))
        times.append((time.perf_counter() - started) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000, help="round trips per carrier, load and repetition")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of A B C D")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.2f}\n")
    found: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(args.repetitions):
        for name, carrier in CARRIERS.items():
            with carrier() as round_trip:
                for load in (0, 32, 1024):
                    found.setdefault((name, load), []).append(measure(round_trip, plan_of(load), args.rounds))
    print("| carrier | requests in the step | p50 us | p99 us | p50 beside the rings' |")
    print("|---|---|---|---|---|")
    for load in (0, 32, 1024):
        base = statistics.median(statistics.median(run) for run in found["rings", load])
        for name in CARRIERS:
            runs = found[name, load]
            p50 = statistics.median(statistics.median(run) for run in runs)
            p99 = statistics.median(sorted(run)[int(len(run) * 0.99)] for run in runs)
            print(f"| {name} | {load} | {p50:.0f} | {p99:.0f} | {p50 / base:.1f}x |")


if __name__ == "__main__":
    main()
