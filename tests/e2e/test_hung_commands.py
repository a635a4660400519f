"""A rank that hangs in a command is noticed, whatever the command; one that is only slow is left alone."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.conftest import TINY
from tests.e2e.orders import WATCHDOG_S, Orders
from tests.e2e.streams import stream_all
from tests.server import Server, wait_ready

STREAMS, TOKENS = 4, 100


def call(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def start_streams(server: Server, pool: ThreadPoolExecutor) -> Future[list[list[int]]]:
    """Streams that are under way when this returns."""
    under_way = threading.Event()

    def look(tokens: list[list[int]]) -> None:
        if min(map(len, tokens)) >= 3:
            under_way.set()

    streams = pool.submit(stream_all, server, STREAMS, TOKENS, look)
    assert under_way.wait(30)
    return streams


def test_a_rank_that_hangs_in_a_commit_is_replaced_and_the_caller_told(misled_pair: Orders) -> None:
    server = misled_pair.server
    undisturbed = stream_all(server, STREAMS, TOKENS)
    crashes, reports = server.metric("worker_crashes_total"), len(list(server.dumps.iterdir()))
    version = httpx.get(server.url + "/v1/server_info", timeout=10).json()["result"]["weight_version"]
    with ThreadPoolExecutor(1) as pool:
        streams = start_streams(server, pool)
        assert call(server, "/v1/pause", mode="in_place").status_code == 200
        misled_pair.give("commit", "SIGSTOP")
        reply = call(server, "/v1/update_weights", model_path=str(TINY), version="new")
        misled_pair.take_back("commit")
        assert reply.status_code == 503, reply.text
        message = reply.json()["error"]["message"]
        assert "the command commit_weights on rank" in message
        assert f"has not moved for {WATCHDOG_S} s (--watchdog-timeout)" in message
        assert f"{TINY} was not loaded, and version {version} is loaded again" in message
        wait_ready(server)
        info = httpx.get(server.url + "/v1/server_info", timeout=10).json()["result"]
        assert (info["is_paused"], info["weight_version"], info["sleeping"], info["fault"]) == (True, version, [], None)
        assert call(server, "/v1/resume").status_code == 200
        assert streams.result(60) == undisturbed
    assert server.metric("worker_crashes_total") == crashes + 1
    stacks = server.output().rsplit("--watchdog-timeout); the threads", 1)[1]
    for seen in ("worker/commands.py", "engine/service.py", "fastengine/frontend/__main__.py"):
        assert seen in stacks, seen
    (report,) = sorted(server.dumps.iterdir(), key=lambda file: file.stat().st_mtime)[reports:]
    assert "commit_weights" in json.loads(report.read_text().splitlines()[0])["reason"]


def test_a_rank_that_dies_in_a_commit_leaves_the_old_weights(misled: Orders) -> None:
    server = misled.server
    undisturbed, checksum = stream_all(server, STREAMS, TOKENS), call(server, "/v1/weights_checksum").json()["result"]
    assert call(server, "/v1/pause").status_code == 200
    misled.give("commit", "SIGKILL")
    reply = call(server, "/v1/update_weights", model_path=str(TINY), version="new")
    misled.take_back("commit")
    assert reply.status_code == 503, reply.text
    lost = "the workers were lost (a worker process was killed from outside (no error in its log)) and are being started again"
    assert reply.json()["error"]["message"] == f"{lost}; {TINY} was not loaded, and version {checksum['weight_version']} is loaded again"
    wait_ready(server)
    assert call(server, "/v1/weights_checksum").json()["result"] == checksum
    assert call(server, "/v1/resume").status_code == 200
    assert stream_all(server, STREAMS, TOKENS) == undisturbed


def test_a_wakeup_that_hangs_leaves_the_server_asleep(misled: Orders) -> None:
    server = misled.server
    assert call(server, "/v1/sleep").status_code == 200
    misled.give("wakeup", "SIGSTOP")
    reply = call(server, "/v1/wakeup")
    misled.take_back("wakeup")
    assert reply.status_code == 503, reply.text
    assert "still asleep" in reply.json()["error"]["message"]
    wait_ready(server)
    assert httpx.get(server.url + "/v1/server_info", timeout=10).json()["result"]["sleeping"] == ["kv_cache", "weight"]
    assert call(server, "/v1/wakeup").status_code == 200
    stream_all(server, STREAMS, TOKENS)


def test_a_rank_that_hangs_in_a_load_is_noticed_after_its_caller_was_told_504(misled_pair: Orders) -> None:
    server = misled_pair.server
    crashes = server.metric("worker_crashes_total")
    assert call(server, "/v1/pause").status_code == 200
    misled_pair.give("prepare", "SIGSTOP")
    reply = call(server, "/v1/update_weights", version="new", timeout_s=WATCHDOG_S / 4)
    misled_pair.take_back("prepare")
    assert reply.status_code == 504, reply.text
    assert call(server, "/v1/update_weights", version="next").status_code == 503  # waits for its turn, which comes with the workers' end
    wait_ready(server)
    assert call(server, "/v1/update_weights", version="next").json()["result"]["weight_version"] == "next"
    assert call(server, "/v1/resume").status_code == 200
    assert server.metric("worker_crashes_total") == crashes + 1


def test_a_load_that_is_slow_is_left_alone_while_it_moves(misled_pair: Orders) -> None:
    """Each tensor of the last rank takes an eighth of the watchdog's time, all of them much more than that."""
    server = misled_pair.server
    undisturbed = stream_all(server, STREAMS, TOKENS)
    crashes = server.metric("worker_crashes_total")
    assert call(server, "/v1/pause").status_code == 200
    misled_pair.give("commit", str(WATCHDOG_S / 8))
    reply = call(server, "/v1/update_weights", version="slow")
    misled_pair.take_back("commit")
    assert reply.json()["result"]["weight_version"] == "slow", reply.text
    assert reply.elapsed.total_seconds() > WATCHDOG_S * 1.5, "the load was not slow"
    assert call(server, "/v1/resume").status_code == 200
    assert stream_all(server, STREAMS, TOKENS) == undisturbed
    assert server.metric("worker_crashes_total") == crashes
