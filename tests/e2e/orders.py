"""Workers that do wrong what a test orders them to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server

WATCHDOG_S = 2
# A step with this prompt in it kills its rank, whatever the orders.
POISON = [7, 7, 7, 7, 7]
FLAGS = ("--watchdog-timeout", str(WATCHDOG_S), "--max-worker-restarts", "20")

# Python runs a file of this name in every process at its start. Here the workers do at some places what a file in DIRECTORY named like the
# place tells their rank: to send themselves a signal, or to take their time.
SITE = """
import os, signal, sys, time
from pathlib import Path
if any(part.endswith("worker/__main__.py") for part in sys.orig_argv) and "paddle.distributed.launch" not in sys.orig_argv:
    def at(place):
        orders = Path({directory!r}) / place
        if orders.exists():
            rank, what = orders.read_text().split()
            if rank == os.environ["PADDLE_TRAINER_ID"]:
                if what.startswith("SIG"):
                    os.kill(os.getpid(), signal.Signals[what])
                else:
                    time.sleep(float(what))
    def wrap(owner, name, place):
        function = getattr(owner, name)
        def wrapped(*args, **kwargs):
            at(place)
            return function(*args, **kwargs)
        setattr(owner, name, wrapped)
    from fastengine.worker.batch import PersistentBatch
    from fastengine.worker.loader.mapped_file import MappedFile
    from fastengine.worker.memory import Storage
    from fastengine.worker.weight_updates import WeightUpdates
    wrap(WeightUpdates, "_checked_model", "prepare")
    wrap(MappedFile, "paged_in", "commit")
    wrap(Storage, "restore", "wakeup")
    rows_of = PersistentBatch.rows
    def rows(batch, plan):
        found, errors = rows_of(batch, plan)
        if any(batch.tokens[slot, :{num_poison}].tolist() == {poison} for slot in found.slots.tolist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return found, errors
    PersistentBatch.rows = rows
"""


class Orders:
    """What the server's workers are to do wrong."""

    def __init__(self, server: Server, directory: Path, num_ranks: int):
        self.server = server
        self.directory = directory
        self.last_rank = num_ranks - 1

    def give(self, place: str, what: str) -> None:
        (self.directory / place).write_text(f"{self.last_rank} {what}")

    def take_back(self, place: str) -> None:
        (self.directory / place).unlink()


@contextlib.contextmanager
def misled_server(model: Path, num_ranks: int, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[Orders]:
    """A server whose workers take orders."""
    directory = tmp_path_factory.mktemp("orders")
    dumps = tmp_path_factory.mktemp("dumps")
    (directory / "sitecustomize.py").write_text(SITE.format(directory=str(directory), poison=POISON, num_poison=len(POISON)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        with running_server(model, *flags, *FLAGS, "--crash-dump-dir", str(dumps), "--tensor-parallel-size", str(num_ranks)) as server:
            patch.undo()
            server.dumps = dumps
            yield Orders(server, directory, num_ranks)
