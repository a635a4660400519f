"""KV blocks in files: what comes back is what was written, or it counts as failed; nothing waits for the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.steps import WorkerCommand, WorkerReply
from fastengine.worker.block_files import BlockFiles, BlockTransfers
from fastengine.worker.commands import CommandHandlers
from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.model_host import ModelHost
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import Request
from tests.worker.models import NUM_BLOCKS

PATIENCE_S = 30.0
NUM_HOST_BLOCKS = 6
KEYS = [bytes([i]) * 16 for i in range(NUM_HOST_BLOCKS)]


def pieces(*sizes: int, seed: int = 0) -> list[memoryview]:
    rng = np.random.default_rng(seed)
    return [memoryview(bytearray(rng.bytes(size))) for size in sizes]


def copied(parts: list[memoryview]) -> list[bytes]:
    return [bytes(part) for part in parts]


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "rank-0")


# -- files ----------------------------------------------------------------------------------------


def test_blocks_come_back_as_they_were_written(files: BlockFiles, tmp_path: Path) -> None:
    many = pieces(*range(1, 1300))  # more than the system takes in one call
    few = pieces(4096, 7, seed=1)
    files.write(KEYS[0], many)
    files.write(KEYS[1], few)
    files.write(KEYS[1], few)
    for key, written in ((KEYS[0], many), (KEYS[1], few)):
        read = [memoryview(bytearray(len(part))) for part in written]
        files.read(key, read)
        assert copied(read) == copied(written)
    assert (tmp_path / "rank-0").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "rank-0").iterdir()} == {0o600}
    files.remove(KEYS[0])
    files.remove(KEYS[0])
    assert [file.name for file in (tmp_path / "rank-0").iterdir()] == [KEYS[1].hex()]


@pytest.mark.parametrize("damage", ["removed", "empty", "short", "long", "one bit", "one bit of the header", "another block's"])
def test_a_damaged_file_is_noticed(files: BlockFiles, tmp_path: Path, damage: str) -> None:
    files.write(KEYS[0], pieces(1000, 2000))
    files.write(KEYS[1], pieces(1000, 2000, seed=1))
    path = tmp_path / "rank-0" / KEYS[0].hex()
    whole = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    elif damage == "another block's":
        path.with_name(KEYS[1].hex()).rename(path)
    else:
        changed = bytearray(whole)
        changed[{"one bit": 2500, "one bit of the header": 20}.get(damage, 0)] ^= 4
        path.write_bytes({"empty": b"", "short": whole[:-1], "long": whole + b"\0"}.get(damage, bytes(changed)))
    with pytest.raises(OSError, match=r"No such file|length|checksum"):
        files.read(KEYS[0], pieces(1000, 2000))


@contextlib.contextmanager
def no_file_over(num_bytes: int) -> Iterator[None]:
    """Writing past ``num_bytes`` fails, the nearest thing to a full disk. Ends before pytest writes its own output."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_file(files: BlockFiles, tmp_path: Path) -> None:
    with no_file_over(1 << 16), pytest.raises(OSError, match="File too large"):
        files.write(KEYS[0], pieces(50_000, 50_000))
    assert list((tmp_path / "rank-0").iterdir()) == []


def test_a_restarted_rank_keeps_whole_files_only(files: BlockFiles, tmp_path: Path) -> None:
    block = pieces(100)
    files.write(KEYS[0], block)
    (tmp_path / "rank-0" / f"{KEYS[1].hex()}.part").write_bytes(b"half")
    again, read = BlockFiles(tmp_path / "rank-0"), [memoryview(bytearray(100))]
    again.read(KEYS[0], read)
    assert copied(read) == copied(block)
    assert len(list((tmp_path / "rank-0").iterdir())) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_host_blocks_pieces_are_all_of_it(dtype: str, files: BlockFiles) -> None:
    cache = KVCache(KVShape(3, 2, 8, 16, dtype), 4, NUM_HOST_BLOCKS, "cpu")
    for block in range(NUM_HOST_BLOCKS):
        assert sum(map(len, cache.host_block(block))) == cache.shape.bytes_per_block
        fill(cache, block, seed=block)
    files.write(KEYS[0], cache.host_block(2))
    before = [copied(cache.host_block(block)) for block in range(NUM_HOST_BLOCKS)]
    files.read(KEYS[0], cache.host_block(5))
    assert [copied(cache.host_block(block)) for block in range(NUM_HOST_BLOCKS)] == [*before[:5], before[2]]


def fill(cache: KVCache, block: int, seed: int) -> None:
    for piece, random in zip(cache.host_block(block), pieces(*map(len, cache.host_block(block)), seed=seed), strict=True):
        piece[:] = random


# -- commands -------------------------------------------------------------------------------------


class Rank:
    """The commands of a tiny Llama's rank that keeps blocks in ``directory``."""

    def __init__(self, golden: Path, directory: Path):
        self.directory = directory
        self.host: ModelHost = loaded_host(golden / "llama")
        self.later: SimpleQueue[WorkerReply] = SimpleQueue()
        self.commands = CommandHandlers(self.host, self.later.put)
        self.init_cache()
        self._last_id = 0

    def init_cache(self) -> None:
        args = {"num_blocks": NUM_BLOCKS, "num_host_blocks": NUM_HOST_BLOCKS, "storage_dir": str(self.directory)}
        reply = self.commands.handle(WorkerCommand(command_id=0, name="init_cache", args=args))
        assert reply is not None
        assert reply.error == ""

    @property
    def cache(self) -> KVCache:
        assert self.host.cache is not None
        return self.host.cache

    def path(self, key: bytes) -> Path:
        return self.directory / "rank-0" / key.hex()

    def send(self, name: str, **args: Any) -> WorkerReply | None:
        self._last_id += 1
        return self.commands.handle(WorkerCommand(command_id=self._last_id, name=name, args=args))

    def later_reply(self) -> WorkerReply:
        return self.later.get(timeout=PATIENCE_S)

    def store(self, blocks: list[int], remove: tuple[bytes, ...] = ()) -> WorkerReply:
        assert self.send("store_blocks", remove=list(remove), keys=[KEYS[b] for b in blocks], blocks=blocks) is None
        return self.later_reply()

    def begin_stuck_load(self, key: bytes) -> None:
        """A load whose file does not open before :meth:`release`."""
        os.mkfifo(self.path(key))
        assert self.send("load_blocks", keys=[key], blocks=[0]) is None

    def release(self, key: bytes) -> None:
        os.close(os.open(self.path(key), os.O_WRONLY))


@pytest.fixture
def rank(golden: Path, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(golden, tmp_path)
    yield rank
    rank.send("shutdown")


def test_blocks_are_stored_and_loaded_and_failures_named(rank: Rank) -> None:
    for block in range(4):
        fill(rank.cache, block, seed=block)
    before = [copied(rank.cache.host_block(block)) for block in range(4)]
    reply = rank.store([0, 1, 2, 3])
    assert (reply.command_id, reply.rank, reply.result, reply.error) == (1, 0, {"failed": []}, "")
    rank.path(KEYS[1]).unlink()
    rank.path(KEYS[3]).write_bytes(rank.path(KEYS[0]).read_bytes())
    for block in range(NUM_HOST_BLOCKS):
        fill(rank.cache, block, seed=99)
    assert rank.send("load_blocks", keys=KEYS[:4], blocks=[5, 4, 3, 2]) is None
    reply = rank.later_reply()
    assert (reply.command_id, reply.result) == (2, {"failed": [1, 3]})
    assert copied(rank.cache.host_block(5)) == before[0]
    assert copied(rank.cache.host_block(3)) == before[2]
    rank.store([1], remove=(KEYS[0], KEYS[4]))
    assert not rank.path(KEYS[0]).exists()
    assert rank.path(KEYS[1]).exists()


def test_a_full_disk_fails_the_blocks_and_not_the_rank(rank: Rank) -> None:
    with no_file_over(1 << 10):
        result = rank.store([0, 1]).result
    assert result == {"failed": [0, 1]}
    assert list((rank.directory / "rank-0").iterdir()) == []


def test_steps_and_commands_go_on_while_a_file_does_not_open(rank: Rank) -> None:
    rank.begin_stuck_load(KEYS[0])
    assert rank.send("ping") is not None
    assert len(driver_of(rank.host).run([Request([5, 6, 7], 4)])[0].output) == 4
    assert rank.later.empty()
    rank.release(KEYS[0])
    assert rank.later_reply().result == {"failed": [0]}


@pytest.mark.parametrize("command", ["sleep", "init_cache", "shutdown"])
def test_what_takes_the_memory_away_waits_for_the_transfers(rank: Rank, command: str) -> None:
    rank.begin_stuck_load(KEYS[0])
    threading.Timer(0.05, rank.release, [KEYS[0]]).start()
    if command == "init_cache":
        rank.init_cache()
    else:
        assert rank.send(command) is not None
    assert not rank.later.empty()  # answered before the command was


def test_no_transfer_without_memory_or_directory(rank: Rank, golden: Path) -> None:
    rank.send("sleep", tags=["kv_cache"])
    reply = rank.send("load_blocks", keys=[], blocks=[])
    assert reply is not None
    assert reply.error_code == 409
    bare = CommandHandlers(loaded_host(golden / "llama"), rank.later.put)
    reply = bare.handle(WorkerCommand(command_id=1, name="store_blocks", args={"remove": [], "keys": [], "blocks": []}))
    assert reply is not None
    assert "storage_dir" in reply.error


def test_a_defect_is_told_and_the_thread_goes_on(files: BlockFiles) -> None:
    replies: SimpleQueue[WorkerReply] = SimpleQueue()
    transfers = BlockTransfers(files, lambda block: [pieces(10)][block], 3, replies.put)
    transfers.store(1, [], [KEYS[0]], [7])
    transfers.store(2, [], [KEYS[0]], [0])
    transfers.close()
    first, second = replies.get_nowait(), replies.get_nowait()
    assert (first.command_id, first.rank, first.error) == (1, 3, "IndexError: list index out of range")
    assert (second.command_id, second.result, second.error) == (2, {"failed": []}, "")


def test_an_answer_that_can_not_be_given_ends_the_rank(files: BlockFiles) -> None:
    def refuse(reply: WorkerReply) -> None:
        raise ConnectionError("the engine is gone")

    transfers = BlockTransfers(files, lambda block: pieces(10), 0, refuse)
    transfers.store(1, [], [KEYS[0]], [0])
    with pytest.raises(ConnectionError):
        transfers.wait()
