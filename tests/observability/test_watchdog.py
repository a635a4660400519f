"""A thread that hangs with work ends its process and says where it stood; one that waits is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PRELUDE = """
import asyncio, sys, threading, time
from fastengine.observability.watchdog import EventLoopWatchdog, ThreadWatchdog, enable_stack_dumps
enable_stack_dumps()
threading.Thread(target=threading.Event().wait, name="bystander", daemon=True).start()
def spin():
    while True: pass
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=30)


def test_a_thread_that_hangs_in_its_work_ends_the_process_with_all_stacks() -> None:
    result = run("""
watchdog = ThreadWatchdog(0.3)
for _ in range(3):
    with watchdog:
        time.sleep(0.15)
with watchdog:
    spin()
""")
    assert result.returncode == -signal.SIGALRM
    assert "in spin" in result.stderr
    assert result.stderr.count("most recent call first") == 2


def test_another_thread_may_hang_while_the_main_thread_waits() -> None:
    result = run("""
def work():
    with ThreadWatchdog(0.3):
        spin()
thread = threading.Thread(target=work)
thread.start()
thread.join()
""")
    assert result.returncode == -signal.SIGALRM
    assert "in spin" in result.stderr


@pytest.mark.parametrize("timeout_s", [0.2, 0])
def test_a_thread_that_waits_or_is_not_watched_is_left_alone(timeout_s: float) -> None:
    result = run(f"""
watchdog = ThreadWatchdog({timeout_s})
with watchdog:
    if not {timeout_s}:
        time.sleep(0.5)
time.sleep(0.5)
watchdog.close()
print("alive")
""")
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


LOOP = """
async def app(scope, receive, send):
    if scope == "hang":
        await asyncio.sleep(0.1)
        spin()
    await asyncio.sleep(1.0)  # longer than the timeout: the loop turns, the request only waits
async def main(*scopes):
    watched = EventLoopWatchdog(0.4).over(app)
    await asyncio.gather(*(watched(scope, None, None) for scope in scopes))
    time.sleep(0.6)  # no request is open
"""


def test_an_event_loop_that_turns_is_left_alone_and_one_that_hangs_under_a_request_is_not() -> None:
    good = run(LOOP + 'asyncio.run(main("a", "b"))')
    assert good.returncode == 0, good.stderr
    bad = run(LOOP + 'asyncio.run(main("a", "hang"))')
    assert bad.returncode == -signal.SIGALRM
    assert "in spin" in bad.stderr


def test_sigusr1_shows_the_stacks_and_ends_nothing() -> None:
    result = run("""
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)
print("alive")
""")
    assert (result.returncode, result.stdout) == (0, "alive\n")
    assert result.stderr.count("most recent call first") == 2
