"""The short form of benchmarks/soak.py, and the measurement of the null model beside it: one server for both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_engine
import soak
from local_server import LocalServer, local_server


@pytest.fixture(scope="module")
def null_server() -> Iterator[LocalServer]:
    with local_server(str(soak.MODEL), [*soak.FLAGS, "--check-invariants"]) as server:
        yield server


def test_nothing_is_left_over_after_random_aborts_disconnects_and_pauses(null_server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(null_server, num_requests=150, concurrency=24, seed=7) == []
    told = capsys.readouterr().out
    for outcome in ("ended", "disconnected", "HTTP 400", "pause"):
        assert outcome in told


def test_every_token_is_counted_and_the_servers_cpu_time_is_its_own(null_server: LocalServer) -> None:
    summary, cpu_s = bench_engine.measure(null_server, streams=4, rounds=2, tokens=40)
    assert summary.output_tokens == 4 * 2 * 40
    assert {"supervisor", "engine", "API process", "worker"} <= set(cpu_s)
    assert all(used >= 0 for used in cpu_s.values())
    assert bench_engine.row(0.0, 4, summary, cpu_s).startswith("| 0 | 4 | ")
