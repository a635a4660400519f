"""Admitter: which waiting requests start in a step, and who must wait a little longer, and why."""

from __future__ import annotations

import enum

from fastengine.config import SchedulerConfig
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.slots import SlotTable
from fastengine.engine.starter import Starter
from fastengine.engine.step_draft import StepDraft
from fastengine.engine.waiting_room import WaitingRoom

# Requests that may be admitted past one that lacks blocks before it goes first, come what may.
MAX_BYPASSES = 64
# Blocks kept for the growth of running sequences when another is admitted: 1 / this of the pool.
WATERMARK_SHARE = 100
# Bytes of prompts, block tables and sampling settings that one plan may start (the ring takes messages of 4 MiB).
MAX_STARTED_BYTES = 3 << 20


class Admit(enum.Enum):
    """Who may be taken from the waiting room."""

    ALL = "all"
    PREEMPTED = "preempted"  # only those that ran before


class Verdict(enum.Enum):
    STARTED = "started"
    RESTORING = "restoring"  # its prefix is being brought in from the host
    NO_BLOCKS = "no_blocks"
    SHARED = "shared"  # its prefix is just being computed: waiting a step or two is cheaper
    LATER = "later"  # too many partial prefills, or no room in this plan


class Admitter:
    def __init__(self, config: SchedulerConfig, slots: SlotTable, waiting: WaitingRoom, starter: Starter):
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._starter = starter

    def admit(self, draft: StepDraft, who: Admit) -> None:
        """Start whoever may and can run in ``draft``."""
        waiting, slots = self._waiting, self._slots
        if waiting.is_settled:
            return
        if not len(waiting):
            waiting.is_settled = True
            return
        waiting.refresh()
        passed_over: list[RequestState] = []
        index = 0
        started_any = False
        reserved = self._starter.num_restoring  # slots for those that only wait for KV, or for a shared prefix
        while draft.budget > 0 and slots.num_free > reserved and draft.started_bytes < MAX_STARTED_BYTES:
            request = waiting.at(index)
            if request is None:
                break
            if who is Admit.PREEMPTED and request.status is RequestStatus.WAITING:
                index += 1
                continue
            verdict = self._try_start(request, draft)
            if verdict is Verdict.STARTED:
                started_any = True
                for other in passed_over:
                    other.bypassed += 1
                continue
            if verdict is Verdict.RESTORING:
                reserved += 1
                continue
            if verdict is Verdict.NO_BLOCKS:
                if request.bypassed >= MAX_BYPASSES:
                    break
                passed_over.append(request)
            elif verdict is Verdict.SHARED:
                reserved += 1
            index += 1
        else:
            return  # the budget, the slots or the plan are full: look again in the next step
        # Until something is released, computed, restored or put there, looking again would find the same.
        waiting.is_settled = not started_any and not draft.chunks

    def _try_start(self, request: RequestState, draft: StepDraft) -> Verdict:
        starter, kv = self._starter, self._starter.kv
        starter.identify(request)
        hits = starter.hits(request)
        num_tokens = len(request.tokens)
        if not request.needs_whole_prompt and kv.is_being_computed(request.blocks, len(hits)):
            return Verdict.SHARED
        must_restore = hits.num_on_host > kv.num_swap_ins_left
        if must_restore and request.restored:
            hits, must_restore = hits.with_at_most(kv.num_swap_ins_left), False
        keep_free = -(-kv.num_blocks // WATERMARK_SHARE) if self._slots.num_used else 0
        if not must_restore:
            hits = starter.with_copy(request, hits, keep_free)
        missing = num_tokens - hits.num_tokens(kv.block_size)
        size = num_tokens * 4 + kv.blocks_for(num_tokens) * 4 + request.sampling_bytes
        if draft.started and draft.started_bytes + size > MAX_STARTED_BYTES:
            return Verdict.LATER
        length = min(missing, draft.budget, starter.chunk_cap(len(self._waiting) > 1 or len(starter.prefilling) > 0))
        if length < missing and draft.num_partial >= self._config.max_num_partial_prefills:
            return Verdict.LATER
        if not kv.can_allocate(hits, num_tokens, keep_free):
            return Verdict.NO_BLOCKS
        if must_restore:
            starter.restore(request, hits)
            return Verdict.RESTORING
        starter.start(request, hits, length, draft)
        return Verdict.STARTED
