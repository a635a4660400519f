"""The scheduler benchmark measures what it says: every running sequence gains a token in every measured step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench_scheduler import Load, measure, row, vllm_times


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_is_measured(overlap: bool) -> None:
    load = Load(running=4, context=20, steps=40, block_size=16, overlap=overlap, clients=2, host_blocks=8)
    times = measure(load)
    assert len(times) == 40
    assert all(time > 0 for time in times)


def test_with_churn_requests_start_and_end_all_the_time() -> None:
    load = Load(running=4, context=20, steps=40, block_size=16, overlap=True, clients=2, pool_blocks=40, history=True, churn=True)
    times = measure(load)
    assert len(times) == 40
    assert all(time > 0 for time in times)


def test_a_row_shows_the_median_and_the_best_run() -> None:
    runs = [[30.0, 30.0], [10.0, 10.0], [20.0, 20.0]]
    load = Load(running=32, context=128, steps=2, block_size=16, overlap=True, clients=1)
    shown = row("x", load, lambda _: runs.pop(), 3).split()
    assert shown[:6] == ["x", "32", "128", "20.0", "10.0", "30"]


def test_vllms_scheduler_is_asked_in_its_own_environment(tmp_path: Path) -> None:
    load = Load(running=4, context=20, steps=2, block_size=16, overlap=True, clients=1)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "loading $3"\necho \'{"version": "1", "times_us": [1.5, 2.5]}\'\n')
    python.chmod(0o755)
    assert vllm_times(python, load) == [1.5, 2.5]
    python.write_text("#!/bin/sh\necho 'no module named vllm' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no module named vllm"):
        vllm_times(python, load)
