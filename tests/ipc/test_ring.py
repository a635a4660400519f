"""The ring delivers every message once, in order, to every reader, and never waits for a slow one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fastengine.ipc.ring import READ_AT, WRITTEN_AT, RingCorrupt, RingFull, RingReader, RingWriter, create_ring


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def drain(reader: RingReader) -> list[bytes]:
    messages = []
    while (message := reader.try_read()) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_arrives_whole_and_in_order_at_every_reader(path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    create_ring(path, capacity=4096, num_readers=3)
    writer, readers = RingWriter(path), [RingReader(path, i) for i in range(3)]
    sent: list[bytes] = []
    got: list[list[bytes]] = [[], [], []]
    for _ in range(3000):
        message = random_.randbytes(random_.choice([0, 1, 7, 8, 9, 200, 1000, 2040]))
        try:
            writer.publish(message)
            sent.append(message)
        except RingFull:
            pass
        for index, reader in enumerate(readers):
            if random_.random() < 0.6:
                got[index] += drain(reader)
    for index, reader in enumerate(readers):
        assert got[index] + drain(reader) == sent
    assert len(sent) > 1000


def test_a_reader_that_stops_makes_the_writer_say_so_and_loses_nothing(path: Path) -> None:
    create_ring(path, capacity=4096, num_readers=2)
    writer, fast, slow = RingWriter(path), RingReader(path, 0), RingReader(path, 1)
    count = 0
    while writer.unread_bytes(1) <= 4096 - 16:
        writer.publish(b"%d" % count)
        fast.try_read()
        count += 1
    with pytest.raises(RingFull, match="reader 1"):
        writer.publish(b"one too many")
    assert drain(slow) == [b"%d" % i for i in range(count)]
    writer.publish(b"again")
    assert drain(slow) == [b"again"]


def test_a_message_over_the_limit_is_refused_with_the_numbers(path: Path) -> None:
    create_ring(path, capacity=4096, num_readers=1)
    writer = RingWriter(path)
    with pytest.raises(ValueError, match="2041 bytes exceeds this ring's 2040"):
        writer.publish(b"x" * 2041)
    writer.publish(b"x" * 2040)
    assert RingReader(path).try_read() == b"x" * 2040


def test_a_reader_of_foreign_memory_raises_instead_of_returning_rubbish(path: Path) -> None:
    create_ring(path, capacity=4096, num_readers=1)
    RingWriter(path).publish(b"hello")
    reader = RingReader(path)
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, (1 << 40).to_bytes(8, "little"), READ_AT + 64)  # the first message's length
    with pytest.raises(RingCorrupt):
        reader.try_read()
    os.pwrite(fd, b"\0" * 8, 0)
    os.close(fd)
    with pytest.raises(RingCorrupt, match="not a ring"):
        RingReader(path)


def test_counters_do_not_share_cache_lines(path: Path) -> None:
    assert WRITTEN_AT % 64 == 0
    assert READ_AT % 64 == 0
    assert READ_AT - WRITTEN_AT >= 64
