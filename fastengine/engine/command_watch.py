"""CommandWatch: which commands the ranks have yet to answer, and since when nothing of them has moved.

A command may take as long as it likes while it *moves*: a rank shows in its signals when it takes one up, and again for
every tensor, or stretch of a file, that it has got through. What is known of a command is the last move of any rank that
owes its answer: a rank that waits for the others stands still as long as they do::

    rank 0   |--take up--|--tensor--|--tensor--| answered
    rank 1   |--take up--|--tensor--|  ^SIGSTOP                      nothing moves from here on
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from fastengine.ipc.signals import SignalBoard
from fastengine.protocol.steps import WorkerCommand, WorkerReply

# Carried out by a thread beside the steps, and answered whenever that is done: a rank owes no more than to take them up.
BACKGROUND = frozenset({"store_blocks", "load_blocks", "compile_grammar"})


class Standstill(NamedTuple):
    """``what`` has not moved since ``since`` (``time.monotonic()``)."""

    since: float
    what: str


@dataclass(eq=False)
class _Owed:
    command: WorkerCommand
    missing: set[int]
    given_at: float


class CommandWatch:
    """Of one generation of workers."""

    def __init__(self, signals: SignalBoard, num_ranks: int):
        self._signals = signals
        self._num_ranks = num_ranks
        self._owed: dict[int, _Owed] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def sent(self, command: WorkerCommand) -> None:
        self._owed[command.command_id] = _Owed(command, set(range(self._num_ranks)), time.monotonic())

    def answered(self, reply: WorkerReply) -> bool:
        """Whether that was the last answer that the command's sender waited for."""
        owed = self._owed.get(reply.command_id)
        if owed is None:
            return False
        owed.missing.discard(reply.rank)
        if owed.missing:
            return False
        del self._owed[reply.command_id]
        return owed.command.name not in BACKGROUND

    def last_move(self) -> float:
        """When any rank that owes an answer has moved; 0: none has."""
        return self._last_move(set().union(*(owed.missing for owed in self._owed.values())))

    def standstills(self) -> list[Standstill]:
        """Of every command that is owed."""
        self._forget_taken_up()
        return [self._standstill(owed) for owed in self._owed.values()]

    def _standstill(self, owed: _Owed) -> Standstill:
        ranks = "rank" if len(owed.missing) == 1 else "ranks"
        what = f"the command {owed.command.name} on {ranks} {', '.join(map(str, sorted(owed.missing)))}"
        return Standstill(max(owed.given_at, self._last_move(owed.missing)), what)

    def _forget_taken_up(self) -> None:
        if any(owed.command.name in BACKGROUND for owed in self._owed.values()):
            last_ids = self._signals.all("last_command_id")
            for command_id, owed in list(self._owed.items()):
                if owed.command.name in BACKGROUND:
                    owed.missing = {rank for rank in owed.missing if last_ids[rank] < command_id}
                    if not owed.missing:
                        del self._owed[command_id]

    def _last_move(self, ranks: set[int]) -> float:
        moved_ns = self._signals.all("command_moved_ns")
        return max((moved_ns[rank] for rank in ranks), default=0) / 1e9
