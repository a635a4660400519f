"""A server started for a measurement, and what its processes use."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastengine.ipc.process import tied_to_parent

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A process's role by a part of its command line; the first that fits counts.
ROLES = {
    "fastengine.entrypoints": "supervisor",
    "fastengine.engine.launch_ranks": "launcher",
    "fastengine.engine": "engine",
    "fastengine.frontend": "API process",
    "worker/__main__.py": "worker",
}


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    role: str
    cpu_s: float
    private_bytes: int


def read_process(pid: int) -> Process | None:
    """None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    role = next((role for part, role in ROLES.items() if part in command), "other")
    return Process(pid, int(fields[1]), role, (int(fields[11]) + int(fields[12])) / TICKS_PER_S, (resident - shared) * PAGE_BYTES)


def process_tree(pid: int) -> list[Process]:
    """The process and all that descend from it."""
    everything = [found for entry in Path("/proc").iterdir() if entry.name.isdigit() and (found := read_process(int(entry.name)))]
    tree = {pid}
    while grown := {process.pid for process in everything if process.parent in tree} - tree:
        tree |= grown
    return [process for process in everything if process.pid in tree]


@dataclass
class LocalServer:
    url: str
    process: subprocess.Popen[bytes]

    def processes(self) -> list[Process]:
        """All processes of the server, itself included."""
        return process_tree(self.process.pid)

    def cpu_s(self) -> dict[str, float]:
        """role -> CPU seconds so far."""
        used: dict[str, float] = {}
        for process in self.processes():
            used[process.role] = used.get(process.role, 0.0) + process.cpu_s
        return used

    def private_bytes(self) -> dict[str, int]:
        """role -> resident memory that is the processes' own: rings and files, which processes share, are left out."""
        used: dict[str, int] = {}
        for process in self.processes():
            used[process.role] = used.get(process.role, 0) + process.private_bytes
        return used

    def metrics(self) -> dict[str, float]:
        """The engine's metrics: name without prefix and labels -> sum over its label values."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("fastengine:"):
                name = line.removeprefix("fastengine:").partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def local_server(model: str, flags: list[str]) -> Iterator[LocalServer]:
    """Start a server on a free port, wait until it is ready, and end it. Raises RuntimeError when it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "fastengine.entrypoints.api_server", "--model", model, "--port", str(port), *flags]
    process = subprocess.Popen(tied_to_parent(command), stdout=subprocess.DEVNULL)
    server = LocalServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(server: LocalServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(server.url + "/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")
