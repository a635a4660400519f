"""How much KV ranks are told to keep, where, and what can't be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastengine.config import CacheConfig
from fastengine.engine.worker_start import EngineFailed, WorkerStart, open_kv_storage
from fastengine.protocol.steps import WorkerCommand, WorkerReady

MIB = 2**20


def told(config: CacheConfig, storage_dir: Path | None = None) -> tuple[WorkerStart, WorkerCommand]:
    """Two ranks that are ready, one with larger blocks and one with fewer."""
    start = WorkerStart(config, 2, storage_dir)
    assert start.rank_is_ready(WorkerReady(rank=1, pid=1, device="cpu", bytes_per_block=MIB, num_blocks=70)) is None
    command = start.rank_is_ready(WorkerReady(rank=0, pid=2, device="cpu", bytes_per_block=2 * MIB, num_blocks=90))
    assert command is not None
    return start, command


def test_every_rank_is_told_what_fits_all() -> None:
    start, command = told(CacheConfig(swap_space=1))
    assert command.args == {"num_blocks": 70, "num_host_blocks": 512}
    assert start.num_disk_blocks == 0


def test_files_have_a_directory_and_a_bound(tmp_path: Path) -> None:
    start, command = told(CacheConfig(swap_space=1, kv_storage_path="kv", kv_storage_size=3), tmp_path)
    assert command.args == {"num_blocks": 70, "num_host_blocks": 512, "storage_dir": str(tmp_path)}
    assert start.num_disk_blocks == 1536


@pytest.mark.parametrize(("swap_gib", "disk_gib"), [(0.001, 1.0), (1.0, 0.001)])
def test_tiers_smaller_than_one_block_are_refused(tmp_path: Path, swap_gib: float, disk_gib: float) -> None:
    with pytest.raises(EngineFailed, match="a KV block has 2097152 bytes: --swap-space and --kv-storage-size"):
        told(CacheConfig(swap_space=swap_gib, kv_storage_path="kv", kv_storage_size=disk_gib), tmp_path)


def test_the_directory_is_this_engines_own(tmp_path: Path) -> None:
    assert open_kv_storage(CacheConfig()) is None
    config = CacheConfig(swap_space=1, kv_storage_path=str(tmp_path / "a" / "kv"))
    (tmp_path / "a" / "kv" / "theirs").mkdir(parents=True)
    one, other = open_kv_storage(config), open_kv_storage(config)
    assert one is not None
    assert other is not None
    assert one.path != other.path
    assert one.path.stat().st_mode & 0o777 == 0o700
    other.close()  # as if its process had died
    third = open_kv_storage(config)
    assert third is not None
    assert sorted(path.name for path in one.path.parent.iterdir()) == sorted([one.path.name, third.path.name, "theirs"])
    for storage in (one, third):
        storage.remove()
    assert [path.name for path in (tmp_path / "a" / "kv").iterdir()] == ["theirs"]


def test_a_path_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineFailed, match=r"--kv-storage-path .*file can't be used"):
        open_kv_storage(CacheConfig(swap_space=1, kv_storage_path=str(tmp_path / "file")))
