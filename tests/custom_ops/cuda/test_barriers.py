"""The workloads notice every barrier of the kernels that is left out, but those that another operation makes up for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fastengine.custom_ops.cuda import build
from tests.custom_ops.cuda import barrier_mutants

# Barriers of a warp between a write and a shuffle or a matrix load. These wait for the whole warp in the shim; in
# CUDA they do not order memory, so the barriers stay.
MADE_UP_FOR = {"moe.cu": 5, "fragment_probe.cu": 1, "select.h": 1}


@pytest.mark.timeout(300)
def test_a_barrier_left_out_shows(shim_library: Path) -> None:
    scripts = Path(__file__).resolve().parents[3] / "scripts"
    command = [sys.executable, str(barrier_mutants.__file__), str(shim_library), str(scripts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    unnoticed = [line.split()[0] for line in result.stdout.splitlines()]
    assert Counter(unnoticed) == MADE_UP_FOR, result.stdout


def test_barriers_are_found_where_they_are() -> None:
    found = list(barrier_mutants.barriers(build.KERNELS))
    assert len(found) > 40
    for name, line in found:
        (path,) = build.KERNELS.rglob(name)
        assert "__sync" in path.read_text().splitlines()[line - 1]
