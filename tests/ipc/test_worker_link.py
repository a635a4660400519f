"""Engine and ranks in different processes: every message arrives, a dead rank is an error at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from fastengine.ipc.bell import Bell, BellClosed, BellRinger
from fastengine.ipc.worker_link import EngineBell, EngineEnd, WorkerEnd


def echo_rank(runtime_dir: Path, rank: int, num_ranks: int) -> int:
    """A child process that answers every message with its rank and the message, until it hears b"stop"."""
    pid = os.fork()
    if pid:
        return pid
    try:
        worker = WorkerEnd(runtime_dir, 0, rank, num_ranks)
        worker.send(b"ready")
        while (message := worker.receive(10.0)) != b"stop":
            if message is not None:
                worker.signals.set("steps_done", rank, worker.signals.get("steps_done", rank) + 1)
                worker.send(b"%d:" % rank + message)
    finally:
        os._exit(0)


def collect(engine: EngineEnd, bell: EngineBell, count: int) -> list[tuple[int, bytes]]:
    got: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + 10
    while len(got) < count:
        assert time.monotonic() < deadline, f"only {got}"
        got += engine.receive()
        if len(got) < count:
            bell.wait(1.0)
    return got


def test_messages_reach_two_ranks_in_order_and_answers_come_back(short_tmp: Path) -> None:
    bell, engine = EngineBell(short_tmp), EngineEnd(short_tmp, 0, 2)
    pids = [echo_rank(short_tmp, rank, 2) for rank in range(2)]
    assert sorted(collect(engine, bell, 2)) == [(0, b"ready"), (1, b"ready")]
    for i in range(500):
        engine.publish(b"%d" % i)
    got = collect(engine, bell, 1000)
    for rank in range(2):
        assert [m for r, m in got if r == rank] == [b"%d:%d" % (rank, i) for i in range(500)]
    assert engine.signals.all("steps_done") == [500, 500]
    assert engine.unread_bytes() == [0, 0]
    engine.publish(b"stop")
    for pid in pids:
        os.waitpid(pid, 0)
    with pytest.raises(BellClosed, match="rank-0"):
        engine.publish(b"anyone?")
    engine.close()
    bell.close()
    assert list(short_tmp.iterdir()) == []


def test_a_killed_rank_is_noticed_by_the_next_publish(short_tmp: Path) -> None:
    bell, engine = EngineBell(short_tmp), EngineEnd(short_tmp, 0, 1)
    pid = echo_rank(short_tmp, 0, 1)
    collect(engine, bell, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(BellClosed):
        engine.publish(b"x")
    engine.close()
    bell.close()


def test_a_bell_rung_before_the_wait_is_not_lost_and_a_full_one_never_blocks(short_tmp: Path) -> None:
    bell, ringer = Bell(short_tmp / "bell"), BellRinger(short_tmp / "bell")
    for _ in range(1000):
        ringer.ring()
    assert bell.wait(None)
    bell.clear()
    assert not bell.wait(0)
    started = time.monotonic()
    assert not bell.wait(0.05)
    assert time.monotonic() - started >= 0.05
    bell.close()


def test_a_ranks_threads_may_answer_at_the_same_time(short_tmp: Path) -> None:
    bell, engine = EngineBell(short_tmp), EngineEnd(short_tmp, 0, 1)
    worker = WorkerEnd(short_tmp, 0, 0, 1)
    messages = [[b"%d:%d" % (thread, i) * (1 + i % 7) for i in range(1500)] for thread in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda own: [worker.send(m) for m in own], args=(own,)) for own in messages]
        for thread in threads:
            thread.start()
        got = [message for _, message in collect(engine, bell, 4500)]
    finally:
        sys.setswitchinterval(before)
    for thread in threads:
        thread.join()
    for own in messages:
        assert [message for message in got if message in set(own)] == own
    worker.close()
    engine.close()
    bell.close()
