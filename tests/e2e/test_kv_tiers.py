"""KV blocks on the host and in files change no token, and what happens to the files hurts nobody."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TINY
from tests.server import Server, running_server, wait_until

BLOCK, BLOCK_BYTES = 8, 4096
DEVICE_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 40, 24, 600
FLAGS = ("--block-size", str(BLOCK), "--max-model-len", "256", "--max-num-seqs", "4", "--check-invariants")
# 30 layers of 3 heads with 16 tokens: keys and values of 64 int8 and their scale.
REAL_BLOCK_BYTES = 30 * 3 * 16 * 2 * (64 + 4)
NUM_PREFIXES, ROUNDS, MAX_TOKENS = 10, 2, 12


def tiers(directory: Path) -> tuple[str, ...]:
    swap, disk = HOST_BLOCKS * BLOCK_BYTES / 2**30, DISK_BLOCKS * BLOCK_BYTES / 2**30
    pool = ("--num-gpu-blocks-override", str(DEVICE_BLOCKS))
    return (*pool, "--swap-space", f"{swap:.12f}", "--kv-storage-path", str(directory), "--kv-storage-size", f"{disk:.12f}")


def prompts() -> list[list[int]]:
    """Prompts of 128 tokens and a few of their own; each prefix comes again when everybody else's has come."""
    prefixes = [[3 + (17 * p + 5 * i + p * i) % 250 for i in range(128)] for p in range(NUM_PREFIXES)]
    return [prefix + [3 + (7 * turn + i) % 250 for i in range(5)] for turn in range(ROUNDS) for prefix in prefixes]


def complete(server: Server, prompt: list[int] | str) -> list[int]:
    body: dict[str, Any] = {"model": "default", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(server.url + "/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["completion_token_ids"]


def complete_all(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt), prompts()))


def block_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("fastengine-*/rank-*/*") if path.suffix != ".part"]


@pytest.fixture(scope="module")
def expected(tiny_server: Server) -> list[list[int]]:
    """Without tiers."""
    return complete_all(tiny_server)


@pytest.fixture
def storage(short_tmp: Path) -> Path:
    return short_tmp / "kv"


@pytest.fixture
def server(storage: Path) -> Iterator[Server]:
    with running_server(TINY, *FLAGS, *tiers(storage)) as server:
        yield server


def test_tokens_are_the_same_whatever_becomes_of_the_files(server: Server, storage: Path, expected: list[list[int]]) -> None:
    assert complete_all(server) == expected
    assert server.metric("swapped_in_blocks_total") > 0
    assert server.metric("stored_blocks_total") > DEVICE_BLOCKS + HOST_BLOCKS
    assert server.metric("loaded_blocks_total") > 0
    assert server.metric("storage_failures_total") == 0
    (directory,) = storage.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700

    files = sorted(block_files(storage))
    for i, file in enumerate(files):
        if i % 3 == 0:
            file.unlink()
        elif i % 3 == 1:
            os.truncate(file, file.stat().st_size // 2)
        else:
            data = bytearray(file.read_bytes())
            data[-100] ^= 0xFF
            file.write_bytes(data)
    assert complete_all(server) == expected
    assert server.metric("storage_failures_total") > 0

    # A killed worker's files are kept for its successor.
    loaded = server.metric("loaded_blocks_total")
    kept = len(block_files(storage))
    os.kill(server.find("worker/__main__.py"), signal.SIGKILL)
    wait_until(lambda: server.metric("worker_restarts_total") == 1, 60, "workers that are back")
    assert len(block_files(storage)) >= kept > 0
    assert complete_all(server) == expected
    assert server.metric("loaded_blocks_total") > loaded

    # No directory any more: nothing can be written or read.
    shutil.rmtree(directory / "rank-0")
    failures = server.metric("storage_failures_total")
    assert complete_all(server) == expected
    assert server.metric("storage_failures_total") > failures
    assert "such blocks are computed again" in (server.runtime_dir() / "worker-logs-1" / "workerlog.0").read_text()


def test_the_directory_goes_with_its_server_or_with_the_next(storage: Path, expected: list[list[int]]) -> None:
    with running_server(TINY, *FLAGS, *tiers(storage), "--restart-engine") as server:
        (first,) = storage.iterdir()
        assert complete(server, prompts()[0]) == expected[0]
        os.kill(server.find("fastengine.engine --"), signal.SIGKILL)
        wait_until(lambda: [*storage.iterdir()] not in ([], [first]), 60, "a directory of the next engine")
        (second,) = storage.iterdir()
        with running_server(TINY, *FLAGS, *tiers(storage), ready=False):  # one that lives is left alone
            wait_until(lambda: len(list(storage.iterdir())) == 2, 60, "a directory of another server")
            assert second.exists()
        assert list(storage.iterdir()) == [second]
    assert list(storage.iterdir()) == []


def test_the_default_model_says_the_same_over_blocks_from_files(default_server: Server, default_model: Path, storage: Path) -> None:
    """16 blocks of 16 tokens on the device, 8 on the host, the rest in files."""
    stories = [f"Chapter {n}. Once upon a time there were {n} little foxes who lived in a forest with {n + 1} old trees. " * 5 for n in range(2, 8)]
    asked = [story + ending for ending in ("One day the", "In the evening they") for story in stories]
    expected = [complete(default_server, prompt) for prompt in asked]
    gib = 2**30
    sizes = ("--swap-space", f"{8 * REAL_BLOCK_BYTES / gib:.9f}", "--kv-storage-size", f"{400 * REAL_BLOCK_BYTES / gib:.9f}")
    flags = ("--block-size", "16", "--max-model-len", "256", "--num-gpu-blocks-override", "16", "--max-num-seqs", "4", "--check-invariants")
    with running_server(default_model, *flags, *sizes, "--kv-storage-path", str(storage)) as server:
        assert [complete(server, prompt) for prompt in asked] == expected
        assert server.metric("loaded_blocks_total") > 0
        assert server.metric("swapped_in_blocks_total") > 0
        assert server.metric("storage_failures_total") == 0
