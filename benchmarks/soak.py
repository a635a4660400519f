"""A long run of everything that can happen to requests, after which nothing may be left over.

    python benchmarks/soak.py [--requests 20000] [--concurrency 64] [--seed 1]

Against a null model with a KV pool far too small for its load, clients stream requests of random length
and leave at random: some read to the end, some disconnect in the middle, some are aborted over the control
API, some set a stop string or a time limit, and the engine is paused and resumed in every mode meanwhile. At the
end all block and container sizes must equal their start, and memory must be flat over the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_stream import Connection, Endpoint, HttpProtocolError, HttpStatusError
from local_server import LocalServer, local_server

MODEL = Path(__file__).parents[1] / "tests" / "golden" / "llama"
FLAGS = [
    "--load-format",
    "null",
    "--max-num-seqs",
    "16",
    "--max-num-batched-tokens",
    "256",
    "--block-size",
    "8",
    "--num-gpu-blocks-override",
    "96",
    "--max-model-len",
    "256",
    "--decode-run-ms",  # of its own accord a null model's worker is given single steps
    "25",
]
VOCAB_SIZE = 256
NULL_TEXT = "\x05"  # what the null model says, again and again
LEFT = "disconnected"
# What must be as at the start once nothing runs. Gauges and sizes only; counters grow.
SIZES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_preempted",
    "num_queued_tokens",
    "batch_size",
    "available_batch_size",
    "available_gpu_block_num",
    "num_steps_in_flight",
    "is_paused",
)
PAUSE_MODES = ("abort", "drain", "retract", "in_place")
PAUSE_PERIOD_S = (0.5, 3.0)
PAUSED_S = (0.0, 0.3)
# Caches and allocators of a warm process still move by this much.
FLAT_BYTES = 8 << 20


@dataclass
class Soak:
    server: LocalServer
    seed: int
    num_requests: int
    concurrency: int
    outcomes: Counter[str] = field(default_factory=Counter)
    num_sent: int = 0
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)  # (requests sent, role -> bytes)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.endpoint = Endpoint.parse(self.server.url)

    async def run(self) -> None:
        clients = [asyncio.create_task(self.client()) for _ in range(self.concurrency)]
        operator = asyncio.create_task(self.operator())
        try:
            await asyncio.gather(*clients)
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
        await self.control("/v1/resume", {})

    async def client(self) -> None:
        connection = Connection(self.endpoint, {"Content-Type": "application/json"})
        while self.num_sent < self.num_requests:
            self.num_sent += 1
            if self.num_sent % max(1, self.num_requests // 20) == 0:
                self.memory.append((self.num_sent, self.server.private_bytes()))
            outcome = await self.request(connection, self.num_sent)
            self.outcomes[outcome] += 1
            if outcome == LEFT:  # the connection ends with the reply that was left
                await connection.close()
                connection = Connection(self.endpoint, {"Content-Type": "application/json"})
        await connection.close()

    def body(self, number: int) -> dict[str, Any]:
        """A request of random shape; one in four shares its prompt's beginning with others."""
        length = self.random.randint(1, 120)
        prompt = [self.random.randrange(3, VOCAB_SIZE) for _ in range(length)]
        if self.random.random() < 0.25:
            prompt = [*range(3, 43), *prompt]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self.random.randint(1, 80), "ignore_eos": True, "stream": True}
        body["request_id"] = f"soak-{number}"
        if self.random.random() < 0.1:
            body["n"] = self.random.randint(2, 4)
        if self.random.random() < 0.1:
            body["stop"] = [NULL_TEXT * self.random.randint(1, 40)]
        if self.random.random() < 0.05:
            body["timeout_s"] = self.random.uniform(0.01, 0.5)
        return body

    async def request(self, connection: Connection, number: int) -> str:
        """Send one request and leave it in one of several ways; returns how it ended."""
        way = self.random.choices(("read", "disconnect", "abort", "refused"), (60, 20, 15, 5))[0]
        body = self.body(number)
        if way == "refused":
            body["max_tokens"], body["prompt"] = 240, [3] * 300
        leave_after = self.random.randint(0, 20)
        try:
            async with aclosing(connection.events("/v1/completions", json.dumps(body).encode())) as events:
                seen, last = 0, b""
                async for _, payload in events:
                    seen += 1
                    if way == "disconnect" and seen > leave_after:
                        return LEFT
                    if way == "abort" and seen == leave_after + 1:
                        await self.control("/v1/abort_requests", {"req_ids": [body["request_id"]]})
                    last = payload if payload != b"[DONE]" else last
        except HttpStatusError as error:
            return f"HTTP {error.status}"
        except (HttpProtocolError, OSError) as error:
            return f"broken: {error}"
        return "error event" if b'"error"' in last else "ended"

    async def operator(self) -> None:
        """Pause and resume now and then."""
        while True:
            mode = self.random.choice(PAUSE_MODES)
            await self.control("/v1/pause", {"mode": mode})
            self.outcomes[f"pause {mode}"] += 1
            await asyncio.sleep(self.random.uniform(*PAUSED_S))
            await self.control("/v1/resume", {})
            await asyncio.sleep(self.random.uniform(*PAUSE_PERIOD_S))

    async def control(self, path: str, body: dict[str, Any]) -> None:
        connection = Connection(self.endpoint, {"Content-Type": "application/json"})
        try:
            await connection.fetch("POST", path, json.dumps(body).encode())
        finally:
            await connection.close()


def sizes(server: LocalServer) -> dict[str, float]:
    metrics = server.metrics()
    return {name: metrics[name] for name in SIZES}


def settled_sizes(server: LocalServer, expected: dict[str, float], timeout_s: float) -> dict[str, float]:
    """The sizes once they equal ``expected``, or what they are after ``timeout_s``: aborts take a moment to arrive."""
    deadline = time.monotonic() + timeout_s
    while (found := sizes(server)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def growth(memory: list[tuple[int, dict[str, int]]]) -> dict[str, int]:
    """role -> bytes that the last quarter's least memory lies above the third quarter's greatest; negative when flat."""
    half = memory[len(memory) // 2 :]
    third, last = half[: len(half) // 2], half[len(half) // 2 :]
    if not third or not last:
        return {}
    return {role: min(used[role] for _, used in last) - max(used[role] for _, used in third) for role in last[-1][1]}


def soak(server: LocalServer, num_requests: int, concurrency: int, seed: int) -> list[str]:
    """Run it; returns what is wrong afterwards."""
    before = sizes(server)
    run = Soak(server, seed, num_requests, concurrency)
    started = time.monotonic()
    asyncio.run(run.run())
    after = settled_sizes(server, before, timeout_s=20.0)
    print(f"{run.num_sent} requests in {time.monotonic() - started:.0f} s: {dict(sorted(run.outcomes.items()))}")
    for sent, used in run.memory:
        print(f"  after {sent:6} requests, MiB: " + ", ".join(f"{role} {bytes_ / 2**20:.0f}" for role, bytes_ in sorted(used.items())))
    wrong = [f"{name}: {before[name]:g} at the start, {after[name]:g} at the end" for name in SIZES if after[name] != before[name]]
    wrong += [f"memory of the {role} grew by {by / 2**20:.0f} MiB" for role, by in growth(run.memory).items() if by > FLAT_BYTES]
    wrong += [f"{count} requests {how}" for how, count in run.outcomes.items() if how.startswith("broken") or how == "HTTP 500"]
    if server.metrics().get("worker_crashes_total", 0.0):
        wrong.append("the workers crashed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--flags", nargs="*", action="extend", default=[], help="more flags of the server, each as --flags=--name=value")
    args = parser.parse_args()
    with local_server(str(MODEL), [*FLAGS, "--api-workers", str(args.api_workers), "--check-invariants", *args.flags]) as server:
        wrong = soak(server, args.requests, args.concurrency, args.seed)
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    print("nothing is left over" if not wrong else "something is left over")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
