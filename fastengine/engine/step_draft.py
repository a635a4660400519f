"""StepDraft: a plan in the making, and the chunks of prompts in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastengine.engine.request_state import RequestState
from fastengine.engine.slots import DecodeBatch
from fastengine.protocol.steps import StartedSequence


@dataclass(slots=True)
class Chunk:
    request: RequestState
    start: int
    length: int

    @property
    def missing(self) -> int:
        """Known tokens behind this chunk."""
        return self.request.num_tokens_at_start - self.start - self.length


@dataclass(slots=True)
class StepDraft:
    batch: DecodeBatch
    budget: int  # tokens that may still be planned
    last_slots: list[int] = field(default_factory=list)
    grown_slots: bytes = b""
    grown_blocks: bytes = b""
    chunks: list[Chunk] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    started_bytes: int = 0
    num_steps: int = 1

    @property
    def num_partial(self) -> int:
        """Prompts that this step leaves unfinished."""
        return sum(1 for chunk in self.chunks if chunk.missing)
