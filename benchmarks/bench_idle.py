"""CPU time of a server that nobody asks anything, by process.

    python benchmarks/bench_idle.py --model FILE.gguf [--seconds 30] [--api-workers 2]

A few completions come first, so that everything there is to start has been started.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from pathlib import Path

from local_server import LocalServer, local_server

WARM_UP_REQUESTS = 8


def ask(server: LocalServer) -> None:
    body = json.dumps({"model": "default", "prompt": "Count from 1 to 20.", "max_tokens": 16}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()


def cpu_ms(server: LocalServer) -> dict[str, float]:
    """role -> CPU milliseconds so far, by the scheduler's own clock: finer than the ticks of /proc/PID/stat."""
    used: dict[str, float] = {}
    for process in server.processes():
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            used[process.role] = used.get(process.role, 0.0) + int(task.read_text().split()[0]) / 1e6
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--api-workers", type=int, default=2)
    args = parser.parse_args()
    with local_server(args.model, ["--api-workers", str(args.api_workers)]) as server:
        for _ in range(WARM_UP_REQUESTS):
            ask(server)
        time.sleep(2.0)  # threads that spin before they sleep
        before = cpu_ms(server)
        time.sleep(args.seconds)
        after = cpu_ms(server)
    used = {role: spent - before.get(role, 0.0) for role, spent in after.items()}
    for role, spent_ms in used.items():
        print(f"{role:>12} {spent_ms:8.2f} ms")
    print(f"{'together':>12} {sum(used.values()):8.2f} ms in {args.seconds:g} s: {sum(used.values()) / args.seconds / 10:.3f} % of a core")
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
