"""A process that is stopped is noticed; one that waits, computes, starts, is held by a debugger or slept with the machine is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastengine.entrypoints.life_watch import ROUNDS_PER_TIMEOUT, WAITING_MARGIN_S, LifeWatch, ProcessLook, Subject, end_hanging, is_pending, look_at
from fastengine.ipc.life_signs import ENGINE, LifeSigns
from fastengine.ipc.runtime_dir import RuntimeDir
from tests.server import wait_until

TIMEOUT_S = 8.0
PERIOD_S = TIMEOUT_S / ROUNDS_PER_TIMEOUT


class Bench:
    """One process as the watch sees it: what it is asked, what it answers, and what the kernel says of it."""

    def __init__(self, signs: LifeSigns):
        self.now = 100.0
        self.signs = signs
        self.state, self.cpu_ticks, self.pid = "S", 10, 7
        self.answers = True
        self.asked: list[int] = []
        self.watch = LifeWatch(signs, TIMEOUT_S, clock=lambda: self.now, look=lambda pid: ProcessLook(self.state, self.cpu_ticks))

    def ask(self, number: int) -> None:
        self.asked.append(number)
        if self.answers:
            self.signs.answer(ENGINE, number)

    def rounds(self, count: int) -> list[str]:
        """What is said of the process in so many rounds."""
        said = []
        for _ in range(count):
            self.now += PERIOD_S
            assert self.watch.is_due
            said += [reason for _, reason in self.watch.round([Subject("it", self.pid, ENGINE, self.ask)])]
            assert not self.watch.is_due
        return said


@pytest.fixture
def bench(short_tmp: Path) -> Iterator[Bench]:
    runtime = RuntimeDir.create(short_tmp)
    signs = LifeSigns(runtime, 1, create=True)
    yield Bench(signs)
    signs.close()
    runtime.remove()


def test_one_that_waits_answers_and_is_left_alone(bench: Bench) -> None:
    assert bench.rounds(50) == []
    assert bench.asked == list(range(1, 51))


def test_one_that_was_stopped_hangs_after_the_timeout(bench: Bench) -> None:
    bench.rounds(2)
    bench.state, bench.answers = "T", False
    # The check before it was stopped was still answered.
    assert bench.rounds(ROUNDS_PER_TIMEOUT) == []
    (reason,) = bench.rounds(1)
    assert "was stopped" in reason
    assert "--watchdog-timeout 8 s" in reason


def test_one_that_is_stuck_otherwise_may_wait_a_little_longer(bench: Bench) -> None:
    bench.rounds(2)
    bench.state, bench.answers = "D", False
    patience = round((TIMEOUT_S + WAITING_MARGIN_S) / PERIOD_S)
    assert bench.rounds(patience) == []
    assert "is in state D" in bench.rounds(1)[0]


@pytest.mark.parametrize("why", ["it computes", "a debugger holds it", "it still starts", "it is another process by now"])
def test_what_is_silent_for_another_reason_is_left_alone(bench: Bench, why: str) -> None:
    bench.rounds(0 if why == "it still starts" else 2)
    bench.answers = False
    for _ in range(50):
        if why == "it computes":
            bench.cpu_ticks += 1
        elif why == "a debugger holds it":
            bench.state = "t"
        elif why == "it is another process by now":
            bench.pid += 1
        assert bench.rounds(1) == []


def test_a_machine_that_sleeps_counts_as_one_round(bench: Bench) -> None:
    bench.rounds(2)
    bench.answers = False
    for _ in range(ROUNDS_PER_TIMEOUT):  # the supervisor wakes hours later, before anybody else
        bench.now += 3 * 3600
        assert bench.rounds(1) == []
    bench.answers = True
    assert bench.rounds(ROUNDS_PER_TIMEOUT) == []


def test_a_lost_check_is_no_sign_of_death(bench: Bench) -> None:
    for i in range(40):
        bench.answers = i % 3 == 0
        assert bench.rounds(1) == []


def test_a_timeout_of_0_watches_nothing(bench: Bench) -> None:
    watch = LifeWatch(bench.signs, 0.0)
    assert watch.due_at is None
    assert not watch.is_due


def test_a_stopped_process_says_where_it_stands_and_is_killed() -> None:
    script = "import sys, signal\nfrom fastengine.observability.watchdog import enable_stack_dumps\nenable_stack_dumps()\n"
    script += "def where_it_stands():\n    print('up', flush=True)\n    while True: signal.pause()\nwhere_it_stands()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGSTOP)
    end_hanging(process.pid)
    assert "in where_it_stands" in process.communicate(timeout=30)[1]
    assert process.returncode == -signal.SIGKILL
    assert look_at(process.pid) is None
    end_hanging(process.pid)  # nothing is left to end


SLEEPER = """
import select, threading
from fastengine.observability.watchdog import ThreadWatchdog, enable_stack_dumps

enable_stack_dumps()

def waits(depth):
    select.select([], [], [], 60) if depth == 0 else waits(depth - 1)

for _ in range(6):
    threading.Thread(target=waits, args=(20,), daemon=True).start()

def the_last_to_be_written():
    ThreadWatchdog(0.1).arm()
    print("armed", flush=True)
    select.select([], [], [], 60)

the_last_to_be_written()
"""


def test_one_whose_own_watchdog_ran_out_while_it_was_stopped_is_heard_to_the_end() -> None:
    """Asked once more, it would be cut short in a quarter of all cases."""
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda pid=process.pid: is_pending(pid, signal.SIGALRM), 10, "the watchdog's end")
            end_hanging(process.pid)
            assert b"the_last_to_be_written" in process.stderr.read()
