"""Servers shared by the tests of this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server

TINY = Path(__file__).parent.parent / "golden" / "llama"
TINY_FLAGS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--max-model-len", "256")


@pytest.fixture(scope="session")
def default_server(default_model: Path) -> Iterator[Server]:
    """A server with the default model, two API processes and every check on."""
    with running_server(default_model, "--api-workers", "2", "--check-invariants", "--max-model-len", "2048") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Server]:
    """A server with a tiny random model. Tests that change its weights put them back."""
    with running_server(TINY, *TINY_FLAGS, "--api-workers", "2", "--check-invariants") as server:
        yield server
