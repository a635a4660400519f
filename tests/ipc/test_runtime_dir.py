"""A dead instance's directory is removed, a live one is never touched."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from fastengine.ipc.runtime_dir import RuntimeDir, remove_dead_instances


def test_directory_is_private_and_removed_by_its_owner(short_tmp: Path) -> None:
    runtime = RuntimeDir.create(short_tmp)
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700
    runtime.file("something").write_bytes(b"x")
    runtime.remove()
    assert list(short_tmp.iterdir()) == []


def test_only_instances_without_a_live_process_are_swept(short_tmp: Path) -> None:
    live = RuntimeDir.create(short_tmp)
    pid = os.fork()
    if pid == 0:
        RuntimeDir.create(short_tmp)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (dead,) = set(short_tmp.iterdir()) - {live.path}
    assert remove_dead_instances(short_tmp) == [dead]
    assert list(short_tmp.iterdir()) == [live.path]
    live.remove()


def test_one_joined_process_keeps_the_directory(short_tmp: Path) -> None:
    creator = RuntimeDir.create(short_tmp)
    joined = RuntimeDir.join(creator.path)
    creator.close()
    assert remove_dead_instances(short_tmp) == []
    joined.close()
    assert remove_dead_instances(short_tmp) == [creator.path]


def test_joining_what_is_gone_raises(short_tmp: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RuntimeDir.join(short_tmp / "fastengine-0-none")
