"""WorkerCommands: commands to all ranks, and their replies collected into one answer each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastengine.protocol.steps import WorkerCommand, WorkerReply

Replies = list[WorkerReply]
NO_RANK = -1


@dataclass
class _Outstanding:
    missing: set[int]
    done: Callable[[Replies], None]
    replies: Replies = field(default_factory=list)


class WorkerCommands:
    """Numbers commands from 1; each is done when every rank has answered or the workers are gone."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._next_id = 1
        self._unsent: list[WorkerCommand] = []
        self._outstanding: dict[int, _Outstanding] = {}

    def __len__(self) -> int:
        return len(self._outstanding)

    def send(self, name: str, args: dict[str, Any], done: Callable[[Replies], None]) -> None:
        """``done`` is called once, with the replies in the order of ranks."""
        command = WorkerCommand(command_id=self._next_id, name=name, args=args)
        self._next_id += 1
        self._unsent.append(command)
        self._outstanding[command.command_id] = _Outstanding(set(range(self._num_ranks)), done)

    def take(self) -> list[WorkerCommand]:
        """Commands to publish, in order."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def process(self, reply: WorkerReply) -> None:
        """Raises ValueError for a reply that nobody has asked for."""
        outstanding = self._outstanding.get(reply.command_id)
        if outstanding is None or reply.rank not in outstanding.missing:
            raise ValueError(f"rank {reply.rank} answers command {reply.command_id}, which does not wait for it")
        outstanding.missing.remove(reply.rank)
        outstanding.replies.append(reply)
        if not outstanding.missing:
            del self._outstanding[reply.command_id]
            outstanding.done(sorted(outstanding.replies, key=lambda r: r.rank))

    def lost(self, why: str) -> None:
        """The workers are gone: every outstanding command fails."""
        outstanding, self._outstanding = self._outstanding, {}
        self._unsent = []
        for command_id, waiting in outstanding.items():
            waiting.done(lost_replies(command_id, why))


def lost_replies(command_id: int = 0, why: str = "") -> Replies:
    """What a command yields when there are no workers to answer it: one reply of no rank."""
    message = f"the workers were lost ({why}) and are being started again" if why else "the workers are being started again"
    return [WorkerReply(command_id=command_id, rank=NO_RANK, error=message, error_code=503)]
