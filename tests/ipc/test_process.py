"""Who may take a core from whom."""

from __future__ import annotations

import os
import subprocess
import sys

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
