"""New connections go to the process with the least to do, and to another one when that one does not take them."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fastengine.frontend.door import Door
from fastengine.frontend.shares import Shares


class Protocol(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"taken")


class Process:
    """What takes connections in an API process."""

    def __init__(self, listener: socket.socket, shares: Shares):
        self.taken: list[Protocol] = []
        self._shares = shares
        shares.enter()
        self._door = Door(listener.dup(), None, self._protocol, handshake_timeout_s=1, has_room=lambda: True, on_accepted=self.show, shares=shares)
        self._door.open()

    def _protocol(self) -> Protocol:
        self.taken.append(Protocol())
        return self.taken[-1]

    def show(self, more: int = 0) -> None:
        self._shares.show(len(self.taken) + more)

    def close(self) -> None:
        self._door.close()


class IdleTimeSelector(selectors.DefaultSelector):
    """A clock that stands still while anything is ready: a stalled machine is no process that leaves its connections to others."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        wait_s = 0.001 if timeout is None else min(timeout, 0.001)
        ready = super().select(wait_s)
        self.now += 0.0 if ready else wait_s
        return ready


class IdleTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._idle_time = IdleTimeSelector()
        super().__init__(self._idle_time)

    def time(self) -> float:
        return self._idle_time.now


def run_in_idle_time(main: Coroutine[Any, Any, list[int]]) -> list[int]:
    loop = IdleTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def connect(listener: socket.socket) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    assert await asyncio.wait_for(reader.readexactly(5), 10) == b"taken"
    return writer


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        yield listener


@pytest.fixture
def shares(tmp_path: Path) -> list[Shares]:
    return [Shares(tmp_path / "shares", index, 3) for index in range(3)]


def test_connections_that_come_one_by_one_are_shared_evenly(listener, shares) -> None:
    async def run() -> list[int]:
        processes = [Process(listener, each) for each in shares]
        writers = [await connect(listener) for _ in range(30)]
        for closing in (*writers, *processes):
            closing.close()
        return [len(process.taken) for process in processes]

    assert run_in_idle_time(run()) == [10, 10, 10]


def test_who_has_much_to_do_is_spared(listener, shares) -> None:
    async def run() -> list[int]:
        processes = [Process(listener, each) for each in shares]
        processes[1].show(more=100)
        writers = [await connect(listener) for _ in range(20)]
        for closing in (*writers, *processes):
            closing.close()
        return [len(process.taken) for process in processes]

    assert run_in_idle_time(run()) == [10, 0, 10]


def test_a_crowd_is_taken_in_though_the_least_busy_process_does_not_move(listener, shares) -> None:
    async def run() -> int:
        shares[0].enter()  # this process is alive, and stopped as far as anybody can tell
        processes = [Process(listener, each) for each in shares[1:]]
        writers = await asyncio.gather(*(connect(listener) for _ in range(150)))
        for closing in (*writers, *processes):
            closing.close()
        return sum(len(process.taken) for process in processes)

    assert asyncio.run(run()) == 150


def test_only_who_lives_and_takes_connections_counts(tmp_path: Path) -> None:
    path = tmp_path / "shares"
    mine = Shares(path, 0, 2)
    mine.enter()
    mine.show(1)
    assert not mine.somebody_has_less()  # nobody is there
    show = "from fastengine.frontend.shares import Shares; from pathlib import Path; import sys; s = Shares(Path(sys.argv[1]), 1, 2); s.enter(); "
    command = [sys.executable, "-c", show + "s.show(0); print(flush=True); input()", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert mine.somebody_has_less()
        mine.show(0)
        assert not mine.somebody_has_less()
        mine.show(1)
        other.kill()
    assert not mine.somebody_has_less()
    successor = Shares(path, 1, 2)
    assert not mine.somebody_has_less()  # it is not ready yet
    successor.enter()
    successor.show(0)
    assert mine.somebody_has_less()
    successor.leave()
    assert not mine.somebody_has_less()
    assert os.stat(path).st_size == 32
