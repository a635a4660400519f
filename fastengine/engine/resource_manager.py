"""ResourceManager: who runs in the next step, with how many tokens and which blocks.

One token budget per step, no phases::

    1. every decoding slot, one token each       (the budget is at least max_num_seqs)
    2. chunks of prompts being prefilled         each gets its fair share
    3. admission from the waiting room           whole prompts, or first chunks
    4. what is left of the budget                to the chunks of 2 and 3

A request's blocks for all tokens known at admission are allocated at once, so only decoding can run out of
blocks; then the least important running request is preempted. Preemption waits until no step is in flight:
first a request that finishes may make it unnecessary, and no sampled token is thrown away.

While all that is to be done is decoding, and none of the sequences needs the engine before, a plan is a run of
as many steps as RunLength allows. Nobody may wait: who is admitted is decided before every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastengine.cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from fastengine.config import SchedulerConfig
from fastengine.engine.admitter import Admit, Admitter
from fastengine.engine.disk_transfers import DiskTransfers
from fastengine.engine.pipeline import InFlightStep
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.run_length import RunLength
from fastengine.engine.slots import EMPTY_BATCH, SlotTable
from fastengine.engine.starter import Starter
from fastengine.engine.step_draft import Chunk, StepDraft
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.engine.worker_commands import WorkerCommands
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.steps import StepPlan
from fastengine.protocol.tokens import pack_token_ids


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
        commands: WorkerCommands,
        run_length: RunLength,
        num_disk_blocks: int = 0,
    ):
        self.kv = kv
        self._run_length = run_length
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._metrics = metrics
        self._clock = clock
        self._starter = Starter(config, slots, kv, waiting, metrics, clock)
        self.transfers = DiskTransfers(num_disk_blocks, self._starter, waiting, commands, metrics)
        self._admitter = Admitter(config, slots, waiting, self._starter)
        self._prefilling = self._starter.prefilling
        self._by_priority = config.scheduling_policy == "priority"
        self._next_step_id = 0

    # -- one step -------------------------------------------------------------------------------

    def plan_step(self, *, nothing_in_flight: bool, admit: Admit, may_run_on: bool = False) -> tuple[StepPlan, InFlightStep] | None:
        """The next step, or with ``may_run_on`` the next few; None when there is nothing to run, or not before the steps in flight are answered."""
        if self._by_priority and admit is Admit.ALL and not self._make_room_for_better(nothing_in_flight):
            return None
        preempted = False
        while (draft := self._draft_decodes()) is None:
            if self._starter.give_up_latest():
                continue
            if not nothing_in_flight:
                return None
            self.preempt(self._least_important())
            preempted = True
        if self._starter.num_restoring:
            self._starter.continue_restores()
        if self._prefilling or not self._waiting.is_settled:
            self._draft_chunks(draft)
            if not preempted:
                self._admitter.admit(draft, admit)
            self._use_up_budget(draft)
        if may_run_on and draft.batch.is_plain and self._only_decodes(draft):
            draft.num_steps += self._slots.advance_freely(self._run_length.most_steps(draft.batch.size) - 1)
        return self._complete(draft)

    def _only_decodes(self, draft: StepDraft) -> bool:
        """Whether the steps after ``draft``'s could be the same again."""
        busy = draft.chunks or draft.last_slots or self.num_restoring or self.kv.has_swaps
        return not (busy or len(self._waiting))

    def plan_alone(self, request: RequestState) -> tuple[StepPlan, InFlightStep]:
        """A step of nothing but ``request``, which waits or is being prefilled. No step may be in flight."""
        draft = StepDraft(EMPTY_BATCH, self._config.token_budget)
        if request.status is RequestStatus.RUNNING:
            length = min(draft.budget, request.num_tokens_at_start - request.prefill_at)
            draft.chunks.append(Chunk(request, request.prefill_at, length))
        else:
            self._starter.identify(request)
            hits = self._starter.hits(request).with_at_most(self.kv.num_swap_ins_left)
            while self._slots.num_free == 0 or not self.kv.can_allocate(hits, len(request.tokens), 0):
                self.preempt(self._least_important())
            hits = self._starter.with_copy(request, hits, 0)
            length = min(draft.budget, len(request.tokens) - hits.num_tokens(self.kv.block_size))
            self._starter.start(request, hits, length, draft)
        completed = self._complete(draft)
        assert completed is not None
        return completed

    def _draft_decodes(self) -> StepDraft | None:
        """Advance every decoding slot by one position; None, and nothing changed, when blocks are lacking."""
        slots = self._slots
        batch = slots.decode_batch()
        draft = StepDraft(batch, self._config.token_budget - batch.size)
        if batch.size == 0:
            return draft
        due = slots.due()
        if due:
            full = slots.full(due)
            if len(full) > self.kv.num_available:
                return None
            if full:
                self._grow(full, draft)
        draft.last_slots = slots.advance(due)
        return draft

    def _grow(self, full: list[int], draft: StepDraft) -> None:
        blocks = self.kv.grow_decoding(self._slots.grow(full))
        draft.grown_slots = pack_token_ids(full)
        draft.grown_blocks = pack_token_ids(blocks)

    def _draft_chunks(self, draft: StepDraft) -> None:
        """A fair share of the budget for every prompt that is being prefilled, and one for those waiting."""
        if not self._prefilling:
            return
        others_wait = len(self._waiting) > 0 and self._slots.num_free > 0 and not self._waiting.is_settled
        contenders = len(self._prefilling) + others_wait
        cap = self._starter.chunk_cap(contenders > 1)
        for request in self._prefilling:
            share = -(-draft.budget // contenders)
            chunk = Chunk(request, request.prefill_at, 0)
            chunk.length = min(chunk.missing, cap, share)
            contenders -= 1
            draft.budget -= chunk.length
            draft.chunks.append(chunk)

    def _use_up_budget(self, draft: StepDraft) -> None:
        cap = self._starter.chunk_cap(len(draft.chunks) > 1)
        for chunk in draft.chunks:
            more = max(0, min(chunk.missing, draft.budget, cap - chunk.length))
            chunk.length += more
            draft.budget -= more

    # -- completing a plan ----------------------------------------------------------------------

    def _complete(self, draft: StepDraft) -> tuple[StepPlan, InFlightStep] | None:
        batch = draft.batch
        chunks = [chunk for chunk in draft.chunks if chunk.length] if draft.chunks else draft.chunks
        has_swaps = self.kv.has_swaps
        if not (batch.size or chunks or has_swaps):
            return None
        step_id = self._next_step_id
        self._next_step_id += draft.num_steps
        step = InFlightStep(step_id, batch, draft.last_slots, [], batch.packed, [], batch.size, self._clock(), draft.num_steps, draft.num_steps > 1)
        columns = (b"", b"", b"")
        if chunks:
            # The slots as they are now: a request may have a different one by the time of the result.
            step.chunked = [(chunk.request.slot, chunk.request) for chunk in chunks]
            step.samplers = [(chunk.request.slot, chunk.request) for chunk in chunks if not chunk.missing]
            step.expected_slots += pack_token_ids([slot for slot, _ in step.samplers])
            step.num_tokens += sum(chunk.length for chunk in chunks)
            columns = (
                pack_token_ids([slot for slot, _ in step.chunked]),
                pack_token_ids([chunk.start for chunk in chunks]),
                pack_token_ids([chunk.length for chunk in chunks]),
            )
            self._advance_chunks(chunks)
        swap_out, swap_in = self._take_swaps() if has_swaps else (b"", b"")
        plan = StepPlan(
            step_id=step_id,
            released=self._slots.take_released(),
            started=draft.started,
            grown_slots=draft.grown_slots,
            grown_blocks=draft.grown_blocks,
            decodes=batch.packed,
            chunk_slots=columns[0],
            chunk_starts=columns[1],
            chunk_lengths=columns[2],
            swap_out=swap_out,
            swap_in=swap_in,
            num_steps=draft.num_steps,
            copies=pack_token_ids(self.kv.take_copies()) if self.kv.has_copies else b"",
        )
        return plan, step

    def _take_swaps(self) -> tuple[bytes, bytes]:
        swap_out, swap_in, saved = self.kv.take_swaps()
        if self.transfers.is_enabled:
            self.transfers.saved(saved)
        self._metrics.counters["swapped_out_blocks"] += len(swap_out) // 2
        self._metrics.counters["swapped_in_blocks"] += len(swap_in) // 2
        return pack_token_ids(swap_out), pack_token_ids(swap_in)

    def _advance_chunks(self, chunks: list[Chunk]) -> None:
        slots = self._slots
        for chunk in chunks:
            request = chunk.request
            computed = chunk.start + chunk.length
            request.prefill_at = computed
            slots.set_computed(request.slot, computed)
            self.kv.register(request.blocks, slots.tokens[request.slot, :computed])
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
        """Nobody holds a slot or a block any more. No step may be in flight."""
        self._starter.give_up_all()
        self.transfers.give_up_all()
        for request in self._slots.running():
            self.preempt(request)

    def release(self, request: RequestState) -> None:
        """Take ``request``, in whatever live state, out of slots, blocks and waiting room."""
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        elif request.status is RequestStatus.WAITING_KV:
            if self._starter.is_restoring(request):
                self._starter.drop(request)
            else:
                self.transfers.drop(request)
        else:
            self._waiting.remove(request)

    def distrust(self, request: RequestState) -> None:
        """The worker failed on ``request``: what it computed must not be found by others."""
        if request.slot >= 0:
            self.kv.disown(request.blocks, (request.num_cached or 0) // self.kv.block_size)

    def _register_all(self, request: RequestState) -> None:
        """Let what ``request``, which is about to leave, has in its blocks be found: whoever finds it runs in a later plan.

        What it decoded is identified here and not as it comes: that keeps the keys' cost out of every step. Its last known
        token may be computed by a run in flight, but that may be cut.
        """
        slot, blocks = request.slot, request.blocks
        if blocks.root is None:
            return
        computed = min(self._slots.num_computed(slot), self._slots.num_known(slot) - 1)
        tokens = self._slots.tokens[slot, :computed]
        if computed > blocks.num_identified:
            self.kv.identify(blocks, blocks.root, tokens.data.cast("B"))
        self.kv.register(blocks, tokens)

    def _vacate(self, request: RequestState) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
        self._register_all(request)
        self._slots.leave(request)
        self.kv.release(request.blocks)
        self._waiting.is_settled = False

    def _least_important(self) -> RequestState:
        return max(self._slots.running(), key=lambda request: (request.priority if self._by_priority else 0, request.arrival_number))

    def _make_room_for_better(self, nothing_in_flight: bool) -> bool:
        """Under the priority policy: preempt for a waiting request that is more important than a running one.

        Returns False when that is due but must wait for the steps in flight.
        """
        if not len(self._waiting):
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

    @property
    def weights_epoch(self) -> int:
        return self._starter.weights_epoch

    def retry_after_s(self) -> float:
        """When a request that is refused now should come back, judged by how fast the queue moves."""
        return self._starter.meter.retry_after_s(len(self._waiting))

    @property
    def has_waiting(self) -> bool:
        return len(self._waiting) > 0

    @property
    def num_restoring(self) -> int:
        """Requests whose KV is on its way."""
        return self._starter.num_restoring + self.transfers.num_waiting

    # -- weights, cache, workers ----------------------------------------------------------------

    def look_again(self) -> None:
        """Who may be admitted has changed."""
        self._waiting.is_settled = False

    def flush(self) -> int:
        """No block's present content is found again; returns how many were findable."""
        self._starter.give_up_all()
        self.look_again()
        return self.transfers.flush() + self.kv.flush(request.blocks for request in self._slots.running())

    def new_weights(self, *, keep_kv: bool) -> None:
        """KV from now on is of other weights. ``keep_kv``: running requests go on over what they have."""
        self._starter.weights_epoch += 1
        if not keep_kv:
            self.preempt_all()
        self.flush()

    def reset_cache(self, kv: KVCacheManager) -> None:
        """The workers start over with an empty cache. Nothing may be running."""
        assert not self._slots.num_used
        assert not self.num_restoring
        self._slots.forget_released()
        self.transfers.cache_is_gone()
        self.kv = self._starter.kv = kv
        self.look_again()

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raise AssertionError unless every block, on the device and the host, is accounted for."""
        pinned = [*self._starter.pinned_keys(), *self.transfers.pinned_keys(self.kv.host)]
        self.kv.check(sequences, pinned, self.transfers.num_reserved(self.kv.host))
        self.transfers.check()
