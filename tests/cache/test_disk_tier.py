"""Which blocks are in files: bounded, and every file that holds nothing any more is removed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.cache.disk_tier import DiskTier


def stored(disk: DiskTier, *keys: bytes) -> None:
    disk.begin_store(keys)
    disk.end_store(keys, [])


def test_a_block_is_found_when_it_is_written_and_not_before() -> None:
    disk = DiskTier(4)
    disk.begin_store([b"a", b"b"])
    assert disk.knows(b"a")
    assert b"a" not in disk
    disk.end_store([b"a"], [b"b"])
    assert b"a" in disk
    assert not disk.knows(b"b")
    assert disk.take_removals() == [b"b"]  # half a file may be there
    disk.check()


def test_the_least_recently_used_make_room() -> None:
    disk = DiskTier(3)
    stored(disk, b"a", b"b", b"c")
    disk.touch([b"a"])
    disk.begin_store([b"d", b"e"])
    assert disk.take_removals() == [b"b", b"c"]
    disk.end_store([b"d", b"e"], [])
    assert [key in disk for key in (b"a", b"d", b"e")] == [True] * 3
    disk.check()


def test_of_a_prefix_that_is_used_the_tail_goes_first() -> None:
    disk = DiskTier(3)
    stored(disk, b"0", b"1", b"2")
    disk.touch([b"0", b"1", b"2"])
    disk.begin_store([b"x"])
    assert disk.take_removals() == [b"2"]


def test_forgetting() -> None:
    disk = DiskTier(4)
    stored(disk, b"a", b"b")
    disk.forget([b"a", b"unknown"])
    disk.begin_store([b"c"])
    assert disk.clear() == 1
    assert sorted(disk.take_removals()) == [b"a", b"b"]
    assert disk.take_removals() == []
    disk.end_store([b"c"], [])
    assert b"c" in disk
    disk.check()


def test_check_notices_a_file_that_is_both_kept_and_removed() -> None:
    disk = DiskTier(4)
    stored(disk, b"a")
    disk.forget([b"a"])
    stored(disk, b"a")
    with pytest.raises(AssertionError, match="to be removed"):
        disk.check()


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("bsfFc"), st.sets(st.integers(0, 9), max_size=4)), max_size=50))
def test_files_are_what_the_books_say(num_blocks: int, events: list[tuple[str, set[int]]]) -> None:
    disk = DiskTier(num_blocks)
    files: set[bytes] = set()
    writing: list[bytes] = []
    for kind, numbers in events:
        keys = [bytes([n]) for n in sorted(numbers)]
        if kind == "b" and not writing:
            writing = [key for key in keys if not disk.knows(key)][:num_blocks]
            disk.begin_store(writing)
            files -= set(disk.take_removals())
            files |= set(writing)
            assert len(files) <= num_blocks
        elif kind in "sf":
            done, failed = (writing, []) if kind == "s" else ([], writing)
            disk.end_store(done, failed)
            writing = []
        elif kind == "F":
            disk.forget(keys)
        elif kind == "c":
            disk.clear()
        disk.check()
        assert all(key in files for key in (bytes([n]) for n in range(10)) if key in disk)
    disk.end_store([], writing)
    assert files - set(disk.take_removals()) == {bytes([n]) for n in range(10) if bytes([n]) in disk}
