"""How connections spread over the API processes, and what CPU time each of these takes.

    python benchmarks/bench_spread.py [--api-workers 2] [--connections 8 32 256] [--repeats 5]

Clients open that many connections, all at once or one after the other with a pause in between, and each streams one
request of a null model. In the middle ``/load`` says how many streams each process has: the share of the one with the
most (even: one divided by the number of processes) and the CPU time by process (least and most) are shown, the
mean over the repeats and the worst, with how long a connection waits from its first packet to the first byte of
a reply, when nothing else is to be done for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
import urllib.request
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from bench_engine import server_flags
from http_stream import Connection, Endpoint
from local_server import LocalServer, local_server
from serving_load import Workload, percentile_ms

MODEL = Path(__file__).parents[1] / "tests" / "golden" / "llama"
STEP_MS = 20.0
TOKENS = 100
WAYS = {"all at once": 0.0, "one after the other": 0.004}


@dataclass
class Spread:
    streams: list[int]  # of each process
    cpu_s: list[float]
    first_reply_s: list[float]


def cpu_by_process(server: LocalServer) -> dict[int, float]:
    """pid -> CPU seconds of the API processes, from the kernel's scheduler."""
    pids = [process.pid for process in server.processes() if process.role == "API process"]
    return {pid: sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9 for pid in pids}


def load(server: LocalServer) -> list[int]:
    with urllib.request.urlopen(server.url + "/load") as reply:
        return [process["streams"] for process in json.load(reply)["api_workers"]]


async def measure(server: LocalServer, connections: int, pause_s: float) -> Spread:
    workload = Workload("completions", TOKENS, True, {}, {}, 60.0)
    first_reply_s: list[float] = []
    is_open = asyncio.Event()
    num_open = 0

    async def client(number: int) -> None:
        nonlocal num_open
        await asyncio.sleep(number * pause_s)
        connection = Connection(Endpoint.parse(server.url), {})
        began = time.perf_counter()
        await connection.fetch("GET", "/version")
        first_reply_s.append(time.perf_counter() - began)
        num_open += 1
        if num_open == connections:
            is_open.set()
        await is_open.wait()
        async with aclosing(connection.events(workload.path, workload.body("default", f"{number}", TOKENS))) as events:
            async for _ in events:
                pass
        await connection.close()

    before = cpu_by_process(server)
    clients = [asyncio.create_task(client(number)) for number in range(connections)]
    await is_open.wait()
    await asyncio.sleep(TOKENS * STEP_MS / 1000 / 2)
    streams = await asyncio.to_thread(load, server)
    await asyncio.gather(*clients)
    after = cpu_by_process(server)
    return Spread(streams, [after[pid] - before[pid] for pid in after], first_reply_s)


def row(workers: int, connections: int, way: str, found: list[Spread]) -> str:
    shares = [max(spread.streams) / sum(spread.streams) for spread in found]
    cpu = [sum(ordered) / len(found) for ordered in zip(*(sorted(spread.cpu_s) for spread in found), strict=True)]
    waits = [wait for spread in found for wait in spread.first_reply_s]
    spans = " ".join("/".join(str(n) for n in sorted(spread.streams)) for spread in found)
    return (
        f"| {workers} | {connections} | {way} | {statistics.mean(shares):.0%} / {max(shares):.0%} | {spans} | {cpu[0] * 1e3:.0f} / {cpu[-1] * 1e3:.0f} "
        f"| {percentile_ms(waits, 50):.2f} | {percentile_ms(waits, 99):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--connections", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    flags = [*server_flags(max(args.connections), STEP_MS), "--api-workers", str(args.api_workers)]
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.2f}\n")
    print("| processes | connections | opened | largest share mean / worst | streams of each | CPU ms least / most | first reply ms p50 | p99 |")
    print("|--:|--:|---|--:|---|--:|--:|--:|", flush=True)
    with local_server(str(MODEL), flags) as server:
        wait_for_all(server, args.api_workers)
        for connections in args.connections:
            for way, pause_s in WAYS.items():
                found = [asyncio.run(measure(server, connections, pause_s)) for _ in range(args.repeats)]
                print(row(args.api_workers, connections, way, found), flush=True)


def wait_for_all(server: LocalServer, workers: int) -> None:
    """The first process is there before the others."""
    deadline = time.monotonic() + 30
    while len(load(server)) < workers:
        if time.monotonic() > deadline:
            raise SystemExit(f"{workers} API processes did not start")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
