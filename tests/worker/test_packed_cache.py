"""Packed weights on disk: what was stored comes back, and nothing else ever does."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fastengine.custom_ops.fused import Layout, Packing
from fastengine.worker.fused_weights import FusedWeights
from fastengine.worker.loader.safetensors import SafetensorsCheckpoint
from fastengine.worker.loader.weights import model_spec, open_checkpoint
from fastengine.worker.packed_cache import CHUNK_BYTES, PAGE_BYTES, SUFFIX, PackedCache, model_files_identity, processor_features
from fastengine.worker.quantization import fused_library

from .models import hf_config, random_weights, write_model, write_safetensors

IDENTITY = {"source": "a model", "operators": "1234"}
HASHES = {"weight": 2**64 - 1}
NUM_BYTES = CHUNK_BYTES + 3 * PAGE_BYTES + 5


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", 1 << 30, 2, least_bytes=0)


def some_bytes(count: int = NUM_BYTES, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def stored_file(cache: PackedCache, tmp_path: Path) -> Path:
    cache.store(IDENTITY, some_bytes(), HASHES)
    (file,) = (tmp_path / "packed").iterdir()
    assert file.suffix == SUFFIX
    return file


def test_what_was_stored_comes_back(cache: PackedCache, tmp_path: Path) -> None:
    assert cache.find(IDENTITY) is None
    file = stored_file(cache, tmp_path)
    found = cache.find(IDENTITY)
    assert found is not None
    assert found.memory[:] == some_bytes().tobytes()
    assert found.hashes == HASHES
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("changed", IDENTITY)
def test_other_weights_are_not_found(cache: PackedCache, tmp_path: Path, changed: str) -> None:
    stored_file(cache, tmp_path)
    assert cache.find({**IDENTITY, changed: "another"}) is None


def test_writing_to_the_mapping_leaves_the_file_alone(cache: PackedCache, tmp_path: Path) -> None:
    before = stored_file(cache, tmp_path).read_bytes()
    found, other = cache.find(IDENTITY), cache.find(IDENTITY)
    assert found is not None
    assert other is not None
    found.memory[:] = b"\1" * NUM_BYTES
    assert other.memory[:] == some_bytes().tobytes()
    assert stored_file(cache, tmp_path).read_bytes() == before


@pytest.mark.parametrize("damage", ["empty", "short", "long", "magic", "description", "first byte", "last byte", "other key", "no file"])
def test_a_damaged_file_is_one_warning_and_can_be_replaced(cache: PackedCache, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = stored_file(cache, tmp_path)
    content = bytearray(file.read_bytes())
    at = {"magic": 0, "description": 20, "first byte": len(content) - NUM_BYTES, "last byte": -1}
    if damage in at:
        content[at[damage]] ^= 1
    elif damage == "other key":
        cache.store({**IDENTITY, "source": "another"}, some_bytes(seed=1), HASHES)
        content = bytearray(next(path for path in file.parent.iterdir() if path != file).read_bytes())
    else:
        content = {"empty": bytearray(), "short": content[:-1], "long": content + b"\0"}.get(damage, content)
    file.unlink()
    if damage == "no file":
        file.mkdir()
    else:
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.find(IDENTITY) is None
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    if damage == "no file":
        file.rmdir()
    cache.store(IDENTITY, some_bytes(), HASHES)
    found = cache.find(IDENTITY)
    assert found is not None
    assert found.memory[:] == some_bytes().tobytes()


def test_processes_that_store_at_once_leave_one_whole_file(cache: PackedCache, tmp_path: Path) -> None:
    threads = [threading.Thread(target=cache.store, args=(IDENTITY, some_bytes(), HASHES)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list((tmp_path / "packed").iterdir())) == 1
    found = cache.find(IDENTITY)
    assert found is not None
    assert found.memory[:] == some_bytes().tobytes()


def test_the_longest_unused_files_make_room(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, 3 * 100_000, 1, least_bytes=0)
    names = [{"source": str(i)} for i in range(3)]
    for age, name in enumerate(names[:2]):
        cache.store(name, some_bytes(100_000), {})
        for file in tmp_path.iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    assert cache.find(names[0]) is not None  # which makes it the one used last
    cache.store(names[2], some_bytes(100_000), {})
    assert [cache.find(name) is not None for name in names] == [True, False, True]


def test_what_does_not_fit_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        PackedCache(tmp_path, 1000, 1, least_bytes=0).store(IDENTITY, some_bytes(1001), HASHES)
    assert "--packed-cache-gib" in caplog.text
    assert not list(tmp_path.iterdir())
    PackedCache(tmp_path, 1 << 30, 1).store(IDENTITY, some_bytes(1000), HASHES)  # not worth a file
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        PackedCache(tmp_path / "file" / "packed", 1 << 30, 1, least_bytes=0).store(IDENTITY, some_bytes(10), HASHES)
    assert len(caplog.records) == 1


def test_what_a_dead_writer_left_is_removed(cache: PackedCache, tmp_path: Path) -> None:
    file = stored_file(cache, tmp_path)
    left, writing = (file.with_name(f".{file.name}.{name}") for name in ("old", "new"))
    left.touch()
    writing.touch()
    os.utime(left, (1000, 1000))
    cache.store(IDENTITY, some_bytes(), HASHES)
    assert not left.exists()
    assert writing.exists()


def test_model_files_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    os.utime(file, ns=(5, 5))
    seen = {model_files_identity([file])}
    with file.open("r+b") as opened:  # same size, same time
        opened.seek(99_999)
        opened.write(b"\1")
    os.utime(file, ns=(5, 5))
    seen.add(model_files_identity([file]))
    os.utime(file, ns=(5, 6))
    seen.add(model_files_identity([file]))
    file.write_bytes(bytes(100_001))
    os.utime(file, ns=(5, 6))
    seen.add(model_files_identity([file]))
    assert len(seen) == 4
    assert model_files_identity([file]) in seen
    assert processor_features() == processor_features()


def test_loaded_from_the_cache_is_what_was_packed(cache: PackedCache, tmp_path: Path) -> None:
    config = hf_config()
    tensors = random_weights(config)
    path = write_model(tmp_path / "model", config, tensors)

    def load() -> tuple[FusedWeights, np.ndarray]:
        weights = FusedWeights(fused_library(), model_spec(str(path)), Packing(Layout.INT8), 128, 1)
        weights.load(open_checkpoint(str(path)), cache, "source")
        (storage,) = weights.storages()
        return weights, storage.bits((slice(None),))

    first, packed = load()
    expected = packed.copy()
    second, mapped = load()
    np.testing.assert_array_equal(mapped, expected)
    assert second.checksum() == first.checksum()

    name = "model.layers.0.mlp.up_proj.weight"
    update = tmp_path / "update.safetensors"
    write_safetensors(update, {name: tensors[name] + 1})
    second.fill(SafetensorsCheckpoint([update]))
    assert (mapped != expected).any()
    third, again = load()
    np.testing.assert_array_equal(again, expected)
    assert third.checksum() == first.checksum() != second.checksum()
    second.drop()
    second.allocate()
    assert not second.storages()[0].bits((slice(None),)).any()
