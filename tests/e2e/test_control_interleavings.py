"""Random interleavings of every control call with arrivals, aborts and disconnects.

Each one starts a handful of streams and control calls at random moments, then resumes and waits. Whatever
the order: no control call takes longer than 2 s, every request ends in exactly one way, no block is lost.
``--interleavings N`` sets how many are run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.server import Server, wait_until

# A pause that drains may wait for the longest request; everything else must be quicker than this.
MAX_CALL_S = 2.0
ENDINGS = {"stop", "length", "abort", "error", "refused", "disconnected"}
# Statuses that a control call may truthfully have when others race it.
TRUTHFUL = {200, 400, 409, 503}


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--interleavings")


class Interleaving:
    """One seeded run against one server."""

    def __init__(self, client: httpx.AsyncClient, seed: int):
        self.client = client
        self.random = random.Random(seed)
        self.seed = seed
        self.endings: list[str] = []
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.slowest = (0.0, "")

    async def run(self) -> None:
        jobs = [self._request(i) for i in range(self.random.randint(3, 8))]
        jobs += [self._control() for _ in range(self.random.randint(3, 8))]
        running = asyncio.gather(*(self._later(job) for job in jobs))
        # Whatever state the calls leave the engine in, somebody wakes it and lets it go on.
        settle = asyncio.create_task(self._settle(running))
        try:
            await asyncio.wait_for(running, 60)
        finally:
            await settle

    async def _later(self, job: Any) -> None:
        await asyncio.sleep(self.random.random() * 0.1)
        await job

    async def _settle(self, running: asyncio.Future[Any]) -> None:
        while not running.done():
            await asyncio.wait([running], timeout=0.15)
            await self._call("/v1/wakeup", {})
            await self._call("/v1/resume", {})

    async def _request(self, index: int) -> None:
        body = {
            "model": "default",
            "prompt": [self.random.randrange(3, 250) for _ in range(self.random.randint(1, 60))],
            "max_tokens": self.random.randint(1, 60),
            "temperature": self.random.choice([0, 1]),
            "n": self.random.choice([1, 1, 2]),
            "request_id": f"r{self.seed}-{index}",
            "stream": True,
            "ignore_eos": True,
        }
        leave_after = self.random.choice([None, None, None, 0, 3])
        ends: list[str] = []
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                assert reply.status_code in (409, 429, 503), (reply.status_code, await reply.aread())
                self.endings.append("refused")
                return
            chunks = 0
            line = ""
            async for line in sse_lines(reply):
                if leave_after is not None and chunks >= leave_after:
                    self.endings.append("disconnected")
                    return
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line[6:])
                    chunks += 1
                    if "error" in chunk:
                        ends.append("error")
                    ends += [c["finish_reason"] for c in chunk.get("choices", []) if c["finish_reason"]]
            assert line == "data: [DONE]", line
        assert len(ends) == body["n"] or ends[-1:] == ["error"], (self.seed, body["n"], ends)
        self.endings += ends

    async def _control(self) -> None:
        path, body = self.random.choice(
            [
                ("/v1/pause", {"mode": "abort"}),
                ("/v1/pause", {"mode": "retract"}),
                ("/v1/pause", {"mode": "in_place"}),
                ("/v1/pause", {"mode": "drain"}),
                ("/v1/resume", {}),
                ("/v1/is_paused", {}),
                ("/v1/abort_requests", {"req_ids": [f"r{self.seed}-{self.random.randint(0, 7)}"]}),
                ("/v1/abort_requests", {"abort_all": True}),
                ("/v1/flush_cache", {}),
                ("/v1/update_weights", {"version": f"v{self.seed}"}),
                ("/v1/update_weights", {"model_path": "/nonexistent"}),
                ("/v1/sleep", {"tags": ["weight"]}),
                ("/v1/sleep", {"tags": ["kv_cache"]}),
                ("/v1/wakeup", {}),
                ("/v1/weights_checksum", {}),
                ("/v1/server_info", {}),
            ]
        )
        await self._call(path, body)

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        started = time.monotonic()
        reply = await self.client.post(path, json=body)
        took = time.monotonic() - started
        assert reply.status_code in TRUTHFUL, (path, body, reply.status_code, reply.text)
        assert (reply.json()["status"] == "success") == (reply.status_code == 200)
        self.statuses[path, reply.status_code] += 1
        if body.get("mode") != "drain":
            self.slowest = max(self.slowest, (took, path))


async def sse_lines(reply: httpx.Response) -> AsyncIterator[str]:
    """Lines as SSE ends them. httpx's own also end at U+0085 or U+2028, which a random model does write."""
    pending = ""
    async for text in reply.aiter_text():
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            if line:
                yield line


def gauge(server: Server, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"fastengine:{name}{{"))


def test_no_interleaving_hangs_loses_a_block_or_ends_a_request_twice(tiny_server: Server, count: int) -> None:
    free = gauge(tiny_server, "available_gpu_block_num")
    endings: Counter[str] = Counter()
    statuses: Counter[tuple[str, int]] = Counter()
    slowest: list[tuple[float, str, int]] = []

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=tiny_server.url, timeout=30) as client:
            for seed in range(count):
                one = Interleaving(client, seed)
                await one.run()
                endings.update(one.endings)
                statuses.update(one.statuses)
                slowest.append((*one.slowest, seed))

    asyncio.run(all_of_them())
    wait_until(lambda: gauge(tiny_server, "num_requests_running") == gauge(tiny_server, "num_requests_waiting") == 0, 5, "an idle engine")
    assert gauge(tiny_server, "available_gpu_block_num") == free
    assert set(endings) <= ENDINGS
    assert {"length", "abort", "disconnected"} <= set(endings)
    print(dict(endings), sorted(slowest)[-3:], dict(statuses))
    assert max(slowest)[0] < MAX_CALL_S, sorted(slowest)[-5:]
