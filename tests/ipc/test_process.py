"""Who may take a core from whom, and who ends with whom."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.server import alive, wait_until

PROGRAM = """
import os, threading
from fastengine.ipc.process import preempt_as_usual, wake_without_preempting

def policies():
    return [os.sched_getscheduler(0), found_in_thread()]

def found_in_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]

wake_without_preempting()
print(policies())
preempt_as_usual()
print(policies())
"""


def test_the_policy_is_of_later_threads_too_and_can_be_undone() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == [str([os.SCHED_BATCH] * 2), str([os.SCHED_OTHER] * 2)]


PARENT = """
import subprocess, sys
from fastengine.ipc.process import tied_to_parent

child = subprocess.Popen(tied_to_parent([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]))
print(child.pid, flush=True)
child.wait()
"""


def test_what_is_tied_to_its_parent_ends_when_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        wait_until(lambda: not alive([pid]), 10, "the end of the child")
