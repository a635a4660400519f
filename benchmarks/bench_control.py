"""How long control calls take while streams run.

    python benchmarks/bench_control.py --model FILE.gguf [--streams 64] [--rounds 5]

Starts a server, keeps ``--streams`` endless streams running, and measures each call as a client sees it.
The row "pause, update, resume" is the whole interruption; "the load itself" is what the same update takes
on an idle paused engine, so their difference is what the streams cost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import httpx
from local_server import local_server

BODY = {"model": "default", "prompt": "Once upon a time", "max_tokens": 4096, "temperature": 1, "ignore_eos": True, "stream": True}
CALLS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "is_paused": [("/v1/is_paused", {})],
    "pause in_place, resume": [("/v1/pause", {"mode": "in_place"}), ("/v1/resume", {})],
    "pause retract, resume": [("/v1/pause", {"mode": "retract"}), ("/v1/resume", {})],
    "flush_cache": [("/v1/flush_cache", {})],
    "weights_checksum": [("/v1/weights_checksum", {})],
    "server_info": [("/v1/server_info", {})],
    "abort one that is not there": [("/v1/abort_requests", {"req_ids": ["nobody"]})],
    "pause, update, resume": [("/v1/pause", {"mode": "in_place"}), ("/v1/update_weights", {}), ("/v1/resume", {})],
}


class Streams:
    """A fixed number of endless streams; one that ends is started again."""

    def __init__(self, client: httpx.AsyncClient, count: int):
        self._client = client
        self._running = [0] * count
        self._tasks = [asyncio.create_task(self._keep(i)) for i in range(count)]

    async def _keep(self, index: int) -> None:
        while True:
            async with self._client.stream("POST", "/v1/completions", json=BODY) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    self._running[index] += line.startswith("data: ")

    async def all_started(self) -> None:
        while not all(self._running):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def timed(client: httpx.AsyncClient, calls: list[tuple[str, dict[str, object]]]) -> float:
    """Milliseconds that ``calls`` take one after the other. Raises when one fails."""
    started = time.perf_counter()
    for path, body in calls:
        reply = await client.post(path, json=body)
        reply.raise_for_status()
    return (time.perf_counter() - started) * 1000


async def measure(url: str, streams: int, rounds: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=streams + 8)) as client:
        await timed(client, [("/v1/pause", {})])
        load = [await timed(client, [("/v1/update_weights", {})]) for _ in range(rounds)]
        await timed(client, [("/v1/resume", {})])
        running = Streams(client, streams)
        await asyncio.wait_for(running.all_started(), 300)
        found: dict[str, list[float]] = {name: [] for name in CALLS}
        for _ in range(rounds):
            for name, calls in CALLS.items():
                found[name].append(await timed(client, calls))
                await asyncio.sleep(0.3)
        await running.stop()
    print(f"| with {streams} streams running | median ms | max ms |\n|---|--:|--:|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.1f} | {max(times):.1f} |")
    print(f"| the load itself (idle, paused) | {statistics.median(load):.1f} | {max(load):.1f} |")
    print(f"| interruption beyond the load | {statistics.median(found['pause, update, resume']) - statistics.median(load):.1f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="measure a running server instead of starting one")
    args = parser.parse_args()
    if args.url:
        asyncio.run(measure(args.url, args.streams, args.rounds))
        return
    with local_server(str(args.model), ["--max-num-seqs", str(args.streams)]) as server:
        asyncio.run(measure(server.url, args.streams, args.rounds))


if __name__ == "__main__":
    main()
