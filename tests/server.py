"""Starting a real server for a test: one helper, whole process tree, everything ended afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from fastengine.ipc.process import tied_to_parent

START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Fail the test unless ``condition`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


@dataclass
class Server:
    """A server under test."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    dumps: Path = Path()  # its --crash-dump-dir, where a test gave one

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tree(self) -> dict[int, str]:
        """pid -> command line of every process of this server, itself included."""
        return process_tree(self.process.pid)

    def find(self, part: str) -> int:
        """The pid of the one process whose command line contains ``part`` (a rank's is also in its launcher's)."""
        found = {pid: command for pid, command in self.tree().items() if part in command}
        if len(found) > 1:
            found = {pid: command for pid, command in found.items() if "launch_ranks" not in command}
        (pid,) = found
        return pid

    def runtime_dir(self) -> Path:
        """The instance's directory in shared memory; the server must have started a process by now."""
        command = next(command for command in self.tree().values() if "--runtime-dir" in command)
        return Path(command.split("--runtime-dir", 1)[1].split()[0])

    def crash_reports(self) -> set[Path]:
        """Those it has said to be written."""
        return {Path(path) for path in re.findall(r"wrote the crash report (\S+)", self.output())}

    def metric(self, name: str) -> float:
        """The sum over all label values of the metric ``fastengine:<name>``."""
        text = httpx.get(self.url + "/metrics", timeout=10).text
        prefix = f"fastengine:{name}"
        rows = [line.split() for line in text.splitlines() if line.startswith((prefix + "{", prefix + " "))]
        assert rows, f"no metric {prefix}"
        return sum(float(row[-1]) for row in rows)

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)


def _stat_and_command(pid: int) -> tuple[int, str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return None if state == "Z" else (int(parent), command)


def process_tree(root: int) -> dict[int, str]:
    processes = {int(p.name): found for p in Path("/proc").iterdir() if p.name.isdigit() and (found := _stat_and_command(int(p.name)))}
    tree = {root: processes[root][1]} if root in processes else {}
    grown = True
    while grown:
        children = {pid: command for pid, (parent, command) in processes.items() if parent in tree and pid not in tree}
        tree.update(children)
        grown = bool(children)
    return tree


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _stat_and_command(pid) is not None]


@contextlib.contextmanager
def running_server(model: Path | str, *flags: str, ready: bool = True) -> Iterator[Server]:
    """Start ``api_server`` with ``flags`` on a free port and (unless told otherwise) wait until it is ready."""
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="fe-server-", suffix=".log")[1])
    command = [sys.executable, "-m", "fastengine.entrypoints.api_server", "--model", str(model), "--port", str(port), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(tied_to_parent(command), stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    server = Server(process, f"http://127.0.0.1:{port}", log)
    tree: dict[int, str] = {}
    try:
        if ready:
            wait_ready(server)
        yield server
    except BaseException:
        print(server.output())
        raise
    finally:
        tree = server.tree()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in alive(list(tree)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        log.unlink()


def wait_ready(server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    def healthy() -> bool:
        assert server.process.poll() is None, f"the server ended with code {server.process.returncode}:\n{server.output()}"
        try:
            return httpx.get(server.url + "/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(healthy, timeout_s, "a ready server")
