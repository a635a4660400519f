"""Processes of a serving instance die or hang: clients see a pause, or a 503 that says why, and then service again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastengine.entrypoints.cli import main as cli
from fastengine.observability.request_log import RequestRecord, read_requests
from tests.e2e.conftest import MORTAL_FLAGS as FLAGS
from tests.e2e.conftest import TINY
from tests.e2e.orders import POISON, Orders
from tests.e2e.streams import stream_all
from tests.server import Server, running_server, wait_ready, wait_until

STREAMS, TOKENS = 32, 200
WORKER, ENGINE, FRONT_END = "worker/__main__.py", "fastengine.engine --", "fastengine.frontend"


@pytest.fixture(scope="module")
def undisturbed(mortal: Server) -> list[list[int]]:
    return stream_all(mortal, STREAMS, TOKENS)


class Blow:
    """Strikes once, when every stream has a few tokens."""

    def __init__(self, pid: int, signum: signal.Signals = signal.SIGKILL):
        self.pid, self.signum, self.struck = pid, signum, False

    def __call__(self, tokens: list[list[int]]) -> None:
        if not self.struck and min(map(len, tokens)) >= 3:
            self.struck = True
            assert max(map(len, tokens)) < TOKENS // 2
            os.kill(self.pid, self.signum)


def rank_pids(server: Server) -> dict[int, int]:
    """rank -> pid, in the order the launcher started them."""
    pids = sorted(pid for pid, command in server.tree().items() if WORKER in command and "launch_ranks" not in command)
    return dict(enumerate(pids))


def read_report(path: Path) -> tuple[dict[str, Any], list[RequestRecord]]:
    """The first line of a crash report, and its requests."""
    return json.loads(path.read_text().splitlines()[0]), list(read_requests(path))


def test_kill_9_of_a_worker_under_32_streams_changes_no_token(mortal: Server, undisturbed: list[list[int]]) -> None:
    before = mortal.metric("worker_crashes_total")
    assert stream_all(mortal, STREAMS, TOKENS, Blow(rank_pids(mortal)[0])) == undisturbed
    assert mortal.metric("worker_crashes_total") == before + 1
    assert mortal.metric("worker_recovery_seconds_count") >= 1
    assert mortal.metric("recomputed_tokens_total") > STREAMS
    assert "the workers died and are started again" in mortal.output()
    assert f"{STREAMS} running requests will be recomputed, 0 have failed" in mortal.output()


def test_a_worker_that_hangs_is_replaced_and_every_process_says_where_it_stands(mortal: Server, undisturbed: list[list[int]]) -> None:
    before = mortal.metric("worker_crashes_total")
    assert stream_all(mortal, STREAMS, TOKENS, Blow(rank_pids(mortal)[0], signal.SIGSTOP)) == undisturbed
    assert mortal.metric("worker_crashes_total") == before + 1
    stacks = mortal.output().split("--watchdog-timeout", 1)[1]
    for place in ("worker/worker.py", "engine/service.py", "fastengine/frontend/__main__.py"):
        assert place in stacks, place


@pytest.mark.parametrize("victim", [FRONT_END, "launch_ranks"])
def test_kill_9_of_another_process_is_recovered_from(mortal: Server, undisturbed: list[list[int]], victim: str) -> None:
    pid = mortal.find(victim)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in mortal.tree(), 5, "the victim's end")
    wait_ready(mortal)
    assert stream_all(mortal, 4, TOKENS) == undisturbed[:4]


def test_what_was_recorded_can_be_replayed(mortal: Server, undisturbed: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    stream_all(mortal, 16, 8)
    (crash, *_) = sorted(mortal.dumps.glob("crash-*"))
    kinds = [json.loads(line)["kind"] for line in crash.read_text().splitlines()]
    assert kinds[:3] == ["crash", "config", "traceback"]
    unfinished = [record for record in read_requests(crash) if record.state != "finished"]
    assert len(unfinished) == STREAMS
    assert all(record.output_token_ids for record in unfinished)
    file = sorted(mortal.dumps.glob("requests-*"))[0]
    assert cli(["replay", str(file), "--url", mortal.url]) == 0
    assert "16 requests: 16 same output" in capsys.readouterr().out
    assert '"finish_reason": "length"' in mortal.output()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGALRM], ids=["killed", "hung"])
def test_a_dead_engine_is_a_503_at_once_and_is_started_again(mortal: Server, undisturbed: list[list[int]], signum: signal.Signals) -> None:
    """SIGALRM is what the watchdog of a thread that hangs sends."""
    reports_before = mortal.crash_reports()
    body = {"model": "default", "prompt": [5, 6], "max_tokens": 240, "ignore_eos": True}
    with httpx.stream("POST", mortal.url + "/v1/completions", json={**body, "stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(mortal.find(ENGINE), signum)
        rest = "".join(lines)
        assert "[DONE]" not in rest.split('"error"')[0]
        assert '"error"' in rest
    wait_until(lambda: mortal.crash_reports() - reports_before, 60, "the report of it")
    report, records = read_report(next(iter(mortal.crash_reports() - reports_before)))
    assert report["what"] == "engine"
    assert [(record.state, record.prompt_token_ids) for record in records if record.state != "finished"] == [("running", [5, 6])]
    assert all(record.output_token_ids for record in records if record.state != "waiting")
    refused = httpx.post(mortal.url + "/v1/completions", json=body, timeout=10)
    assert refused.status_code == 503, refused.text
    wait_ready(mortal)
    assert stream_all(mortal, 4, TOKENS) == undisturbed[:4]
    if signum == signal.SIGALRM:
        assert "it hung for --watchdog-timeout seconds" in mortal.output()
        assert "engine/service.py" in mortal.output().rsplit("it hung for", 1)[0]


@pytest.mark.parametrize("victim", [ENGINE, FRONT_END], ids=["engine", "api"])
def test_a_stopped_process_counts_as_dead(mortal: Server, undisturbed: list[list[int]], victim: str) -> None:
    """Nothing in it can tell: its supervisor asks, and notices that it neither answers nor uses the CPU."""
    pid, hangs_before = mortal.find(victim), mortal.output().count(" hangs: it was stopped")
    reports_before = mortal.crash_reports()
    body = {"model": "default", "prompt": [5, 6], "max_tokens": 240, "ignore_eos": True, "stream": True}
    with contextlib.suppress(httpx.TransportError):  # what a client of a killed API process sees
        with httpx.stream("POST", mortal.url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            rest = "".join(lines)
        # It is continued for a moment before its end, to say where it stands, which may be enough to finish.
        assert '"error"' in rest or rest.endswith("[DONE]")
    wait_until(lambda: pid not in mortal.tree(), 60, "the victim's end")
    # Until the supervisor has seen it too, its server seems healthy.
    wait_until(lambda: mortal.crash_reports() - reports_before, 60, "the report of it")
    wait_ready(mortal)
    assert mortal.output().count(" hangs: it was stopped") == hangs_before + 1
    stacks = mortal.output().rsplit(" hangs: it was stopped", 1)[1]
    assert ("engine/service.py" if victim == ENGINE else "fastengine/frontend/__main__.py") in stacks
    report, records = read_report(next(iter(mortal.crash_reports() - reports_before)))
    assert report["what"] == ("engine" if victim == ENGINE else "API process 0")
    assert "it hung: it was stopped" in report["reason"]
    assert records[-1].prompt_token_ids == [5, 6]  # finished meanwhile, in the engine of a stopped API process
    assert stream_all(mortal, 4, TOKENS) == undisturbed[:4]


def test_two_ranks_give_what_one_gives_and_survive_the_death_of_one(misled_pair: Orders, undisturbed: list[list[int]]) -> None:
    server = misled_pair.server
    crashes = server.metric("worker_crashes_total")
    assert len(rank_pids(server)) == 2
    assert stream_all(server, STREAMS, TOKENS, Blow(rank_pids(server)[1])) == undisturbed
    assert server.metric("worker_crashes_total") == crashes + 1
    assert httpx.post(server.url + "/v1/pause", json={"mode": "drain"}, timeout=30).status_code == 200
    assert httpx.get(server.url + "/v1/is_paused", timeout=10).json()["result"]["is_paused"]
    assert httpx.post(server.url + "/v1/resume", json={}, timeout=30).status_code == 200
    assert stream_all(server, 4, TOKENS) == undisturbed[:4]


def test_a_request_that_kills_the_workers_twice_fails_alone(misled: Orders, undisturbed: list[list[int]]) -> None:
    server = misled.server
    crashes = server.metric("worker_crashes_total")
    body = {"model": "default", "prompt": POISON, "max_tokens": 4}
    poisoned = []

    def poison(tokens: list[list[int]]) -> None:
        if not poisoned and min(map(len, tokens)) >= 3:
            poisoned.append(pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=100))

    with ThreadPoolExecutor(1) as pool:
        assert stream_all(server, 8, TOKENS, poison) == undisturbed[:8]
        reply = poisoned[0].result()
    assert reply.status_code == 500, reply.text
    assert "crashed twice in a row" in reply.json()["error"]["message"]
    assert server.metric("worker_crashes_total") == crashes + 2
    assert stream_all(server, 4, TOKENS) == undisturbed[:4]  # and whoever comes later finds a sound server


def test_an_api_process_that_can_never_work_ends_the_server_with_its_message(tmp_path: Path) -> None:
    """A tokenizer that was fine at the start and is not any more."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    with running_server(tmp_path, *FLAGS) as server:
        (tmp_path / "tokenizer.json").write_text("{}")
        os.kill(server.find("fastengine.frontend"), signal.SIGKILL)
        assert server.wait_exit(60) == 1
        assert "the model's tokenizer can't be used" in server.output()
        assert server.output().count("API process 0 died") == 2  # killed, then hopeless
