"""Which pages memory is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.memory import Storage

pytestmark = pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages has no flag for them")


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


@pytest.mark.parametrize("huge", [False, True])
def test_huge_pages_are_asked_for_where_they_suit(huge: bool):
    storage = Storage((5 << 20,), "uint8", "cpu", huge_pages=huge)
    storage.allocate()
    assert wants_huge_pages(storage) is huge


def test_keys_and_values_want_them_and_blocks_of_the_host_do_not():
    cache = KVCache(KVShape(2, 3, 64, 64, "int8"), num_blocks=300, num_host_blocks=300, device="cpu")
    for layer in cache.layers:
        assert [wants_huge_pages(storage) for storage in (layer.key, layer.value)] == [True, True]
    for layer in cache.host_layers:
        assert not any(wants_huge_pages(storage) for storage in layer.storages())
    cache.drop()
    cache.allocate()
    assert wants_huge_pages(cache.layers[1].value)
