"""The processes that render the templates of requests: one for each, started before it is asked for.

::

    spare process, imports done, waits for its task ──▶ one task ──▶ its end; the next spare is started meanwhile

Starting an interpreter and importing Jinja takes a tenth of a second and more, a template a millisecond. A spare process
that loses its parent reads an end of file and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

# Wall-clock bound on a task; its processor time is bounded by the process itself.
TIMEOUT_S = 5.0


class TemplateChildren:
    """Hands tasks to child processes. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: subprocess.Popen[bytes] | None = None
        self._keeps_spare = False

    def prepare(self) -> None:
        """Start a spare process, and from now on another whenever it has been used."""
        with self._lock:
            self._keeps_spare = True
            self._replace_spare()

    def _replace_spare(self) -> None:
        if self._spare is None and self._keeps_spare:
            self._spare = _start()

    def run(self, task: bytes) -> tuple[int, bytes]:
        """(exit code, output) of a process that was given ``task``. Raises subprocess.TimeoutExpired."""
        with self._lock:
            child, self._spare = self._spare, None
        if child is None or child.poll() is not None:
            child = _start()
        try:
            with child:
                try:
                    output, _ = child.communicate(task, TIMEOUT_S)
                except BaseException:
                    child.kill()
                    raise
                return child.returncode, output
        finally:
            with self._lock:
                self._replace_spare()

    def close(self) -> None:
        with self._lock:
            child, self._spare, self._keeps_spare = self._spare, None, False
        if child is not None:
            with child:
                child.kill()


def _start() -> subprocess.Popen[bytes]:
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    command = [sys.executable, "-m", "fastengine.text.template_sandbox"]
    # What goes wrong is told by the exit code: nobody reads its last words.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/")
