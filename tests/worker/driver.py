"""A naive engine for tests: it turns requests into step plans and collects what comes back.

It takes any ``step`` function, so the same scenarios drive a model runner in this process and worker
processes at the other end of the rings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import RowError, StartedSequence, StepPlan, StepResult
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Request:
    prompt: list[int]
    max_new: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    arrival_step: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    error: RowError | None = None
    # Filled while it runs:
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.max_new

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class Driver:
    """Runs requests to their end: every running one in each step, prompts in pieces of ``chunk_size()`` tokens."""

    def __init__(self, step: Callable[[StepPlan], StepResult], *, max_num_seqs: int, block_size: int, num_blocks: int):
        self._step = step
        self._block_size = block_size
        self._free_slots = list(range(max_num_seqs))[::-1]
        # Shuffled, so that a sequence's blocks never happen to be neighbours.
        self._free_blocks = np.random.default_rng(7).permutation(num_blocks).tolist()
        self._released: list[int] = []
        self._next_step_id = 0

    def run(self, requests: list[Request], chunk_size: Callable[[], int] = lambda: 1 << 30) -> list[Request]:
        waiting = sorted(requests, key=lambda r: r.arrival_step)
        running: list[Request] = []
        first_step = self._next_step_id
        while waiting or running:
            arrived = [r for r in waiting if first_step + r.arrival_step <= self._next_step_id][: len(self._free_slots)]
            waiting = [r for r in waiting if r not in arrived]
            running += arrived
            result = self._step(self._plan(running, arrived, chunk_size))
            self._collect(running, result)
            for request in [r for r in running if r.done]:
                running.remove(request)
                self._released.append(request.slot)
                self._free_slots.append(request.slot)
                self._free_blocks += request.blocks
        return requests

    def _plan(self, running: list[Request], arrived: list[Request], chunk_size: Callable[[], int]) -> StepPlan:
        started, grown, decodes, chunks = [], [], [], []
        released, self._released = self._released, []
        for request in running:
            if request in arrived:
                request.slot = self._free_slots.pop()
                request.blocks = [self._free_blocks.pop() for _ in range(-(-len(request.prompt) // self._block_size))]
                started.append(self._started(request))
            if request.num_computed == request.num_tokens - 1 and request.output:
                if request.num_tokens > len(request.blocks) * self._block_size:
                    request.blocks.append(self._free_blocks.pop())
                    grown.append((request.slot, request.blocks[-1]))
                decodes.append(request.slot)
                request.num_computed += 1
            else:
                length = min(chunk_size(), request.num_tokens - request.num_computed)
                chunks.append((request.slot, request.num_computed, length))
                request.num_computed += length
        columns = list(zip(*chunks, strict=True)) or [(), (), ()]
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        return StepPlan(
            step_id=step_id,
            released=pack_token_ids(released),
            started=started,
            grown_slots=pack_token_ids(slot for slot, _ in grown),
            grown_blocks=pack_token_ids(block for _, block in grown),
            decodes=pack_token_ids(decodes),
            chunk_slots=pack_token_ids(columns[0]),
            chunk_starts=pack_token_ids(columns[1]),
            chunk_lengths=pack_token_ids(columns[2]),
        )

    def _started(self, request: Request) -> StartedSequence:
        return StartedSequence(
            slot=request.slot,
            token_ids=pack_token_ids(request.prompt),
            num_prompt=len(request.prompt),
            num_computed=0,
            block_ids=pack_token_ids(request.blocks),
            sampling=request.sampling,
            seed=request.seed,
            request_id=f"request-{request.slot}",
        )

    def _collect(self, running: list[Request], result: StepResult) -> None:
        by_slot = {request.slot: request for request in running}
        for slot, token in zip(unpack_token_ids(result.slots).tolist(), unpack_token_ids(result.token_ids).tolist(), strict=True):
            by_slot[slot].output.append(token)
        for entry in result.logprobs:
            by_slot[entry.slot].logprobs += entry.tokens
        for entry in result.prompt_logprobs:
            by_slot[entry.slot].prompt_logprobs += entry.tokens
        for error in result.errors:
            by_slot[error.slot].error = error
