"""ResourceManager: who runs in the next step, with how many tokens and which blocks.

One token budget per step, no phases::

    1. every decoding slot, one token each       (the budget is at least max_num_seqs)
    2. chunks of prompts being prefilled         each gets its fair share
    3. admission from the waiting room           whole prompts, or first chunks
    4. what is left of the budget                to the chunks of 2 and 3

A request's blocks for all tokens known at admission are allocated at once, so only decoding can run out of
blocks; then the least important running request is preempted. Preemption waits until no step is in flight:
first a request that finishes may make it unnecessary, and no sampled token is thrown away.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from fastengine.cache.kv_cache_manager import KVCacheManager
from fastengine.cache.prefix_index import root_key
from fastengine.config import SchedulerConfig
from fastengine.engine.pipeline import InFlightStep
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.slots import EMPTY_BATCH, DecodeBatch, Index, SlotTable
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids

# Requests that may be admitted past one that lacks blocks before it goes first, come what may.
MAX_BYPASSES = 64
# Blocks kept for the growth of running sequences when another is admitted: 1 / this of the pool.
WATERMARK_SHARE = 100
# Bytes of prompts and block tables that one plan may start (the ring takes messages of 4 MiB).
MAX_STARTED_BYTES = 3 << 20


class Admit(enum.Enum):
    """Who may be taken from the waiting room."""

    ALL = "all"
    PREEMPTED = "preempted"  # only those that ran before


class Verdict(enum.Enum):
    STARTED = "started"
    NO_BLOCKS = "no_blocks"
    SHARED = "shared"  # its prefix is just being computed: waiting a step or two is cheaper
    LATER = "later"  # too many partial prefills, or no room in this plan


@dataclass
class Chunk:
    request: RequestState
    start: int
    length: int

    @property
    def missing(self) -> int:
        """Known tokens behind this chunk."""
        return self.request.num_tokens_at_start - self.start - self.length


@dataclass
class StepDraft:
    """A plan in the making."""

    batch: DecodeBatch
    budget: int
    last_rows: list[int] = field(default_factory=list)
    grown_slots: bytes = b""
    grown_blocks: bytes = b""
    chunks: list[Chunk] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    started_bytes: int = 0


class ResourceManager:
    """Moves requests between the waiting room and the slots, and writes the plans."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        kv: KVCacheManager,
        waiting: WaitingRoom,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ):
        self.kv = kv
        self.weights_epoch = 0
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._metrics = metrics
        self._clock = clock
        self._prefilling: list[RequestState] = []
        self._next_step_id = 0

    # -- one step -------------------------------------------------------------------------------

    def plan_step(self, *, nothing_in_flight: bool, admit: Admit) -> tuple[StepPlan, InFlightStep] | None:
        """The next step; None when there is nothing to run, or not before the steps in flight are answered."""
        if admit is Admit.ALL and not self._make_room_for_better(nothing_in_flight):
            return None
        preempted = False
        while (draft := self._draft_decodes()) is None:
            if not nothing_in_flight:
                return None
            self.preempt(self._least_important())
            preempted = True
        others_wait = len(self._waiting) > 0 and self._slots.num_free > 0 and not self._waiting.is_settled
        self._draft_chunks(draft, others_wait)
        if not preempted:
            self._admit(draft, admit)
        self._use_up_budget(draft)
        return self._complete(draft)

    def plan_alone(self, request: RequestState) -> tuple[StepPlan, InFlightStep]:
        """A step of nothing but ``request``, which waits or is being prefilled. No step may be in flight."""
        draft = StepDraft(EMPTY_BATCH, self._config.max_num_batched_tokens)
        if request.status is RequestStatus.RUNNING:
            length = min(draft.budget, request.num_tokens_at_start - request.prefill_at)
            draft.chunks.append(Chunk(request, request.prefill_at, length))
        else:
            self._identify(request)
            while self._slots.num_free == 0 or not self.kv.can_allocate(self._hits(request), len(request.tokens), 0):
                self.preempt(self._least_important())
            hits = self._hits(request)
            length = min(draft.budget, len(request.tokens) - len(hits) * self.kv.block_size)
            self._waiting.take(request)
            self._start(request, hits, length, draft)
        completed = self._complete(draft)
        assert completed is not None
        return completed

    def _draft_decodes(self) -> StepDraft | None:
        """Advance every decoding slot by one position; None, and nothing changed, when blocks are lacking."""
        slots = self._slots
        batch = slots.decode_batch()
        draft = StepDraft(batch, self._config.max_num_batched_tokens - batch.size)
        if batch.size == 0:
            return draft
        positions = slots.num_computed[batch.slots]
        rows = (positions >= slots.limit[batch.slots]).nonzero()[0]
        if len(rows):
            at, at_positions = batch.slots[rows], positions[rows]
            full = at[at_positions >= slots.capacity[at]]
            if len(full):
                if len(full) > self.kv.num_available:
                    return None
                self._grow(full, draft)
            ending = at_positions >= slots.last_position[at]
            draft.last_rows = rows[ending].tolist()
            for slot in at[ending].tolist():
                slots.stop_decoding(slot)
        slots.num_computed[batch.slots] = positions + 1
        return draft

    def _grow(self, full: Index, draft: StepDraft) -> None:
        slots = self._slots
        requests = slots.requests
        last_blocks = slots.last_block_tokens(full) if self.kv.enable_prefix_caching else b""
        blocks = self.kv.grow_decoding([requests[slot].blocks for slot in full.tolist()], last_blocks)
        slots.grow(full)
        draft.grown_slots = pack_token_ids(full)
        draft.grown_blocks = pack_token_ids(blocks)

    def _draft_chunks(self, draft: StepDraft, others_wait: bool) -> None:
        """A fair share of the budget for every prompt that is being prefilled, and one for those waiting."""
        if not self._prefilling:
            return
        contenders = len(self._prefilling) + others_wait
        cap = self._chunk_cap(contenders > 1)
        for request in self._prefilling:
            share = -(-draft.budget // contenders)
            chunk = Chunk(request, request.prefill_at, 0)
            chunk.length = min(chunk.missing, cap, share)
            contenders -= 1
            draft.budget -= chunk.length
            draft.chunks.append(chunk)

    def _chunk_cap(self, others_wait: bool) -> int:
        threshold = self._config.long_prefill_token_threshold
        return threshold if others_wait and threshold else self._config.max_num_batched_tokens

    def _use_up_budget(self, draft: StepDraft) -> None:
        cap = self._chunk_cap(len(draft.chunks) > 1)
        for chunk in draft.chunks:
            more = max(0, min(chunk.missing, draft.budget, cap - chunk.length))
            chunk.length += more
            draft.budget -= more

    # -- admission ------------------------------------------------------------------------------

    def _admit(self, draft: StepDraft, admit: Admit) -> None:
        waiting, slots = self._waiting, self._slots
        if waiting.is_settled or not len(waiting):
            return
        waiting.refresh()
        passed_over: list[RequestState] = []
        index = 0
        started_any = False
        reserved = 0  # slots for those that only wait for a shared prefix
        while draft.budget > 0 and slots.num_free > reserved and draft.started_bytes < MAX_STARTED_BYTES:
            request = waiting.at(index)
            if request is None:
                break
            if admit is Admit.PREEMPTED and request.status is RequestStatus.WAITING:
                index += 1
                continue
            verdict = self._try_start(request, draft)
            if verdict is Verdict.STARTED:
                started_any = True
                for other in passed_over:
                    other.bypassed += 1
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
        # Until something is released, computed or put there, looking again would find the same.
        waiting.is_settled = not started_any and not draft.chunks

    def _try_start(self, request: RequestState, draft: StepDraft) -> Verdict:
        self._identify(request)
        hits = self._hits(request)
        num_tokens = len(request.tokens)
        if self.kv.is_being_computed(request.blocks, len(hits), num_tokens):
            return Verdict.SHARED
        missing = num_tokens - len(hits) * self.kv.block_size
        size = num_tokens * 4 + self.kv.blocks_for(num_tokens) * 4
        if draft.started and draft.started_bytes + size > MAX_STARTED_BYTES:
            return Verdict.LATER
        length = min(missing, draft.budget, self._chunk_cap(len(self._waiting) > 1 or len(self._prefilling) > 0))
        if length < missing and self._num_partial(draft) >= self._config.max_num_partial_prefills:
            return Verdict.LATER
        keep_free = -(-self.kv.num_blocks // WATERMARK_SHARE) if self._slots.num_used else 0
        if not self.kv.can_allocate(hits, num_tokens, keep_free):
            return Verdict.NO_BLOCKS
        self._waiting.take(request)
        self._start(request, hits, length, draft)
        return Verdict.STARTED

    @staticmethod
    def _num_partial(draft: StepDraft) -> int:
        return sum(1 for chunk in draft.chunks if chunk.missing)

    def _identify(self, request: RequestState) -> None:
        if self.kv.enable_prefix_caching:
            root = root_key(self.weights_epoch, request.request.adapter, request.request.cache_salt)
            self.kv.identify(request.blocks, root, request.tokens.tobytes())

    def _hits(self, request: RequestState) -> list[int]:
        if request.wants_prompt_logprobs and request.first_token_at is None:
            return []  # every position of the prompt must be computed to have its log-probability
        return self.kv.lookup(request.blocks, len(request.tokens))

    def _start(self, request: RequestState, hits: list[int], length: int, draft: StepDraft) -> None:
        num_tokens, size = len(request.tokens), self.kv.block_size
        self.kv.allocate(request.blocks, hits, num_tokens)
        num_computed = len(hits) * size
        self._count_start(request, num_tokens, num_computed)
        token_ids = request.tokens.tobytes()
        block_ids = pack_token_ids(request.blocks.block_ids)
        slot = self._slots.enter(request, num_computed=num_computed, capacity=len(request.blocks.block_ids) * size)
        request.transition(RequestStatus.RUNNING)
        request.prefill_at, request.num_tokens_at_start = num_computed, num_tokens
        request.prompt_logprobs = []
        draft.started.append(
            StartedSequence(
                slot=slot,
                token_ids=token_ids,
                num_prompt=request.num_prompt,
                num_computed=num_computed,
                block_ids=block_ids,
                sampling=request.request.sampling,
                seed=request.seed,
                request_id=request.request_id,
            )
        )
        draft.started_bytes += len(token_ids) + len(block_ids)
        draft.chunks.append(Chunk(request, num_computed, length))
        draft.budget -= length
        self._prefilling.append(request)

    def _count_start(self, request: RequestState, num_tokens: int, num_cached: int) -> None:
        counters = self._metrics.counters
        if self.kv.enable_prefix_caching:
            counters["prefix_cache_queries"] += num_tokens
            counters["prefix_cache_hits"] += num_cached
        if request.started_at is None:
            request.started_at = self._clock()
            request.num_cached = num_cached
            self._metrics.histograms["request_queue_time_seconds"].observe(request.started_at - request.arrived_at)
        else:
            counters["recomputed_tokens"] += num_tokens - num_cached

    # -- completing a plan ----------------------------------------------------------------------

    def _complete(self, draft: StepDraft) -> tuple[StepPlan, InFlightStep] | None:
        chunks = [chunk for chunk in draft.chunks if chunk.length]
        if not chunks and draft.batch.size == 0:
            return None
        step_id = self._next_step_id
        self._next_step_id += 1
        expected, num_tokens = draft.batch.packed, draft.batch.size
        chunked: list[tuple[int, RequestState]] = []
        samplers: list[tuple[int, RequestState]] = []
        columns: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        if chunks:
            # The slots as they are now: a request may have a different one by the time of the result.
            chunked = [(chunk.request.slot, chunk.request) for chunk in chunks]
            samplers = [(chunk.request.slot, chunk.request) for chunk in chunks if not chunk.missing]
            num_tokens += sum(chunk.length for chunk in chunks)
            expected += pack_token_ids(slot for slot, _ in samplers)
            columns = (
                pack_token_ids(slot for slot, _ in chunked),
                pack_token_ids(chunk.start for chunk in chunks),
                pack_token_ids(chunk.length for chunk in chunks),
            )
            self._advance_chunks(chunks)
        plan = StepPlan(
            step_id=step_id,
            released=self._slots.take_released(),
            started=draft.started,
            grown_slots=draft.grown_slots,
            grown_blocks=draft.grown_blocks,
            decodes=draft.batch.packed,
            chunk_slots=columns[0],
            chunk_starts=columns[1],
            chunk_lengths=columns[2],
        )
        step = InFlightStep(
            step_id=step_id,
            batch=draft.batch,
            last_rows=draft.last_rows,
            samplers=samplers,
            expected_slots=expected,
            chunked=chunked,
            num_tokens=num_tokens,
            published_at=self._clock(),
        )
        return plan, step

    def _advance_chunks(self, chunks: list[Chunk]) -> None:
        slots = self._slots
        for chunk in chunks:
            request = chunk.request
            computed = chunk.start + chunk.length
            request.prefill_at = computed
            slots.num_computed[request.slot] = computed
            self.kv.register(request.blocks, computed)
            if not chunk.missing:
                self._prefilling.remove(request)
                # It samples the token at `computed`; is that one its last?
                if computed + 1 < request.end:
                    slots.start_decoding(request.slot)
        self._waiting.is_settled = False

    # -- leaving --------------------------------------------------------------------------------

    def preempt(self, request: RequestState) -> None:
        """``request`` gives up slot and blocks and will be recomputed. No step may be in flight."""
        self._metrics.counters["num_preemptions"] += 1
        request.num_preemptions += 1
        self._vacate(request)
        request.transition(RequestStatus.PREEMPTED)
        self._waiting.put_back(request)

    def preempt_all(self) -> None:
        for request in self._slots.running():
            self.preempt(request)

    def release(self, request: RequestState) -> None:
        """Take ``request``, in whatever live state, out of slots, blocks and waiting room."""
        if request.status is RequestStatus.RUNNING:
            self._register_all(request)
            self._vacate(request)
        else:
            self._waiting.remove(request)

    def distrust(self, request: RequestState) -> None:
        """The worker failed on ``request``: what it computed must not be found by others."""
        if request.slot >= 0:
            self.kv.disown(request.blocks, (request.num_cached or 0) // self.kv.block_size)

    def _register_all(self, request: RequestState) -> None:
        """Let every full block of ``request`` be found: whoever finds one runs in a later plan."""
        slot, blocks = request.slot, request.blocks
        if blocks.root is None:
            return
        computed = int(min(self._slots.num_computed[slot], self._slots.num_known[slot]))
        if computed // self.kv.block_size > len(blocks.keys):
            self.kv.identify(blocks, blocks.root, self._slots.tokens[slot, :computed].tobytes())
        self.kv.register(blocks, computed)

    def _vacate(self, request: RequestState) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
        self._slots.leave(request)
        self.kv.release(request.blocks)
        self._waiting.is_settled = False

    def _least_important(self) -> RequestState:
        by_priority = self._config.scheduling_policy == "priority"
        return max(self._slots.running(), key=lambda request: (request.priority if by_priority else 0, request.arrival_number))

    def _make_room_for_better(self, nothing_in_flight: bool) -> bool:
        """Under the priority policy: preempt for a waiting request that is more important than a running one.

        Returns False when that is due but must wait for the steps in flight.
        """
        if self._config.scheduling_policy != "priority" or not len(self._waiting):
            return True
        self._waiting.refresh()
        best = self._waiting.at(0)
        assert best is not None
        while self._slots.num_used:
            need = self.kv.blocks_for(len(best.tokens))
            if self._slots.num_free and need <= self.kv.num_available:
                return True
            worst = self._least_important()
            if worst.priority <= best.priority or not self._would_make_room(best, need):
                return True
            if not nothing_in_flight:
                return False
            self.preempt(worst)
        return True

    def _would_make_room(self, best: RequestState, need: int) -> bool:
        """Whether preempting everything less important than ``best`` would let it run."""
        lower = [request for request in self._slots.running() if request.priority > best.priority]
        return need <= self.kv.num_available + sum(len(request.blocks.block_ids) for request in lower)

    # -- weights, cache, workers ----------------------------------------------------------------

    def look_again(self) -> None:
        """Who may be admitted has changed."""
        self._waiting.is_settled = False

    def flush(self) -> int:
        """No block's present content is found again; returns how many were findable."""
        self.look_again()
        return self.kv.flush(request.blocks for request in self._slots.running())

    def new_weights(self, *, keep_kv: bool) -> None:
        """KV from now on is of other weights. ``keep_kv``: running requests go on over what they have."""
        self.weights_epoch += 1
        if not keep_kv:
            self.preempt_all()
        self.flush()

    def reset_cache(self, kv: KVCacheManager) -> None:
        """The workers start over with an empty cache. Nothing may be running."""
        assert not self._slots.num_used
        self._slots.forget_released()
        self.kv = kv
        self.look_again()
