"""Which pages memory is on."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.memory import Storage, ask_for_huge_pages, gives_huge_pages, with_huge_pages

has_flag = pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages has no flag for them")


def wants_huge_pages(storage: Storage) -> bool:
    """What the kernel says of the mapping that the storage lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= storage.address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping at the storage's address")


@has_flag
@pytest.mark.parametrize("huge", [False, True])
def test_huge_pages_are_asked_for_where_they_suit(huge: bool):
    storage = Storage((5 << 20,), "uint8", "cpu", huge_pages=huge)
    storage.allocate()
    assert wants_huge_pages(storage) is huge


@has_flag
def test_keys_and_values_want_them_and_blocks_of_the_host_do_not():
    cache = KVCache(KVShape(2, 3, 64, 64, "int8"), num_blocks=300, num_host_blocks=300, device="cpu")
    for layer in cache.layers:
        assert [wants_huge_pages(storage) for storage in (layer.key, layer.value)] == [True, True]
    for layer in cache.host_layers:
        assert not any(wants_huge_pages(storage) for storage in layer.storages())
    cache.drop()
    cache.allocate()
    assert wants_huge_pages(cache.layers[1].value)


def in_small_pages(path: Path, content: bytes) -> mmap.mmap:
    """A private mapping of a file that is in the page cache in pieces of 4 KiB."""
    path.write_bytes(content)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, len(content), mmap.PAGESIZE):
            os.pread(file.fileno(), mmap.PAGESIZE, offset)
        return mmap.mmap(file.fileno(), len(content), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.skipif(not gives_huge_pages(), reason="the system gives no huge pages")
def test_a_file_on_small_pages_is_copied_to_huge_ones(tmp_path: Path):
    content = os.urandom(1 << 20) * 24
    memory = in_small_pages(tmp_path / "weights", content)
    ask_for_huge_pages(memory)
    assert memory[:] == content
    copy = with_huge_pages(memory)
    assert copy is not memory
    assert copy[:] == content
    assert with_huge_pages(copy) is copy, "the copy is on huge pages"


def test_nothing_is_copied_where_there_are_no_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = in_small_pages(tmp_path / "weights", b"x" * (4 << 20))
    monkeypatch.setattr("fastengine.worker.memory.gives_huge_pages", lambda: False)
    assert with_huge_pages(memory) is memory


def test_a_kernel_without_huge_pages_is_asked_in_vain(monkeypatch: pytest.MonkeyPatch):
    class Memory(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    ask_for_huge_pages(Memory(-1, mmap.PAGESIZE))
    monkeypatch.setattr(mmap, "mmap", Memory)
    storage = Storage((5 << 20,), "uint8", "cpu", huge_pages=True)
    storage.allocate()
    assert storage.bits((slice(0, 3),)).tolist() == [0, 0, 0]
