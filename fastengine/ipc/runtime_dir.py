"""The instance's private directory: every shared-memory file and socket of one server lives in it.

It stands on tmpfs (so the rings are shared memory), has mode 0700 and carries a random id. Every
process of the instance holds a shared ``flock`` on its ``alive`` file: the kernel drops a dead
process's lock, so whoever gets the lock exclusively knows that nobody is left and may remove the
directory. A live instance can't be mistaken for a dead one, whatever killed it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX = "fastengine-"
ALIVE_FILE = "alive"
# sun_path holds 108 bytes; the longest socket name below the directory needs about 24.
MAX_DIR_LENGTH = 80


def default_root() -> Path:
    """``/dev/shm`` where it is a writable directory, the system's temporary directory elsewhere."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class RuntimeDir:
    """A handle on the instance's directory that keeps it marked as alive.

    Owns the lock's file descriptor. The creator removes the directory with :meth:`remove`; processes
    that joined only :meth:`close`.
    """

    def __init__(self, path: Path, lock_fd: int):
        self.path = path
        self._lock_fd = lock_fd

    @property
    def instance_id(self) -> str:
        return self.path.name.removeprefix(PREFIX)

    @classmethod
    def create(cls, root: Path | None = None, *, holds_sockets: bool = True) -> RuntimeDir:
        """Make a new instance's directory, after removing those of dead instances beside it. Raises OSError."""
        root = root or default_root()
        remove_dead_instances(root)
        path = root / f"{PREFIX}{os.getuid()}-{secrets.token_hex(5)}"
        if holds_sockets and len(str(path)) > MAX_DIR_LENGTH:
            raise OSError(f"{path} is too long for Unix sockets ({MAX_DIR_LENGTH} bytes): set TMPDIR to a shorter path")
        staging = path.with_name("." + path.name)  # invisible to the sweep until it is locked
        staging.mkdir(mode=0o700)
        lock_fd = _open_locked(staging / ALIVE_FILE)
        staging.rename(path)
        return cls(path, lock_fd)

    @classmethod
    def join(cls, path: str | Path) -> RuntimeDir:
        """Attach to a directory made by another process of the instance. Raises FileNotFoundError."""
        path = Path(path)
        return cls(path, _open_locked(path / ALIVE_FILE, create=False))

    def file(self, name: str) -> Path:
        return self.path / name

    def ipc_address(self, name: str) -> str:
        """A ZMQ ``ipc://`` address inside the directory."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self) -> None:
        """Delete the directory with all that is in it. Mapped memory stays valid for who holds it."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _open_locked(file: Path, *, create: bool = True) -> int:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def remove_dead_instances(root: Path) -> list[Path]:
    """Remove this user's directories that no live process holds; returns what was removed."""
    removed = []
    for path in root.glob(f"{PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path / ALIVE_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1  # half removed by a killed process
        except OSError:
            continue
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            continue
        finally:
            if fd >= 0:
                os.close(fd)
    return removed
