"""Servers shared by the tests of this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastengine import LLM
from tests.e2e.orders import WATCHDOG_S, Orders, misled_server
from tests.server import Server, running_server

TINY = Path(__file__).parent.parent / "golden" / "llama"
MORTAL_FLAGS = ("--max-num-seqs", "32", "--num-gpu-blocks-override", "128", "--max-model-len", "256", "--check-invariants")
TINY_FLAGS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--max-model-len", "256")


@pytest.fixture(scope="session")
def default_server(default_model: Path) -> Iterator[Server]:
    """A server with the default model, two API processes and every check on."""
    with running_server(default_model, "--api-workers", "2", "--check-invariants", "--max-model-len", "2048") as server:
        yield server


@pytest.fixture(scope="session")
def default_llm(default_model: Path) -> Iterator[LLM]:
    """The default model offline, in runs of decode steps."""
    flags = {"max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 64, "check_invariants": True, "decode_run_ms": 25.0}
    with LLM(str(default_model), **flags) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Server]:
    """A server with a tiny random model. Tests that change its weights put them back."""
    with running_server(TINY, *TINY_FLAGS, "--api-workers", "2", "--check-invariants") as server:
        yield server


@pytest.fixture(scope="session")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes tests may kill: it recovers, and each test leaves it serving."""
    dumps = tmp_path_factory.mktemp("dumps")
    evidence = ("--crash-dump-dir", str(dumps), "--dump-requests", "16", "--log-requests", "--watchdog-timeout", str(WATCHDOG_S))
    with running_server(TINY, *MORTAL_FLAGS, *evidence, "--restart-engine") as server:
        server.dumps = dumps
        yield server


@pytest.fixture(scope="session")
def misled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orders]:
    """A server whose one rank does wrong what tests order it to; each test leaves it serving."""
    with misled_server(TINY, 1, tmp_path_factory, *MORTAL_FLAGS) as orders:
        yield orders


@pytest.fixture(scope="session")
def misled_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orders]:
    """The same with two ranks, of which the last takes the orders."""
    with misled_server(TINY, 2, tmp_path_factory, *MORTAL_FLAGS) as orders:
        yield orders
