"""Starter: the way of a request from the waiting room into a slot.

A request whose prefix is on the host starts at once when the plan that starts it can bring all of it in.
When that is more than one plan may copy, it is *restored* first: it waits in WAITING_KV, holding blocks for
what it has on the host, while plans bring those in piece by piece beside their other work::

    WAITING, PREEMPTED --restore--> WAITING_KV --all is there--> back into the waiting room

Then its blocks are found like any others. A request is restored once at most before it runs, and a restore
can be given up at any time: neither can hold up anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastengine.cache.kv_cache_manager import NO_HITS, Hits, KVCacheManager
from fastengine.cache.prefix_index import root_key
from fastengine.config import SchedulerConfig
from fastengine.engine.queue_meter import QueueMeter
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.slots import SlotTable
from fastengine.engine.step_draft import Chunk, StepDraft
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.steps import StartedSequence
from fastengine.protocol.tokens import pack_token_ids


@dataclass
class Restore:
    """A request in WAITING_KV: which blocks of its table the host has yet to give, and what it was before."""

    request: RequestState
    missing: deque[int]
    came_from: RequestStatus


class Starter:
    """Gives requests their blocks and slots; owns those being restored and those being prefilled."""

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
        self.prefilling: list[RequestState] = []  # running, and not all of their known tokens are computed
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._metrics = metrics
        self._clock = clock
        self.meter = QueueMeter(clock)
        self._restores: dict[str, Restore] = {}

    # -- starting -------------------------------------------------------------------------------

    def chunk_cap(self, others_wait: bool) -> int:
        """Most tokens of one prompt in one step."""
        threshold = self._config.long_prefill_token_threshold
        return threshold if others_wait and threshold else self._config.token_budget

    def identify(self, request: RequestState) -> None:
        if self.kv.enable_prefix_caching:
            root = root_key(self.weights_epoch, request.request.adapter, request.request.cache_salt)
            self.kv.identify(request.blocks, root, request.tokens.tobytes())

    def hits(self, request: RequestState) -> Hits:
        """What of ``request``, identified before, needs no computing."""
        if request.needs_whole_prompt:
            return NO_HITS
        return self.kv.lookup(request.blocks, len(request.tokens))

    def with_copy(self, request: RequestState, hits: Hits, keep_free: int) -> Hits:
        """``hits``, of those that may be used for ``request``, and what a copy of a block would save beside them."""
        return hits if request.needs_whole_prompt else self.kv.with_copy(request.blocks, hits, request.tokens, keep_free)

    def start(self, request: RequestState, hits: Hits, length: int, draft: StepDraft) -> None:
        """Let ``request``, which waits, run: its first ``length`` tokens behind the hits are in ``draft``."""
        num_tokens, size = len(request.tokens), self.kv.block_size
        self._waiting.take(request)
        self.kv.allocate(request.blocks, hits, request.tokens)
        num_computed = hits.num_tokens(size)
        self._count_start(request, num_tokens, hits)
        token_ids = request.tokens.tobytes()
        block_ids = pack_token_ids(request.blocks.block_ids)
        slot = self._slots.enter(request, num_computed=num_computed, capacity=len(request.blocks.block_ids) * size)
        request.transition(RequestStatus.RUNNING)
        request.prefill_at, request.num_tokens_at_start = num_computed, num_tokens
        request.prompt_logprobs = []
        request.restored = request.looked_on_disk = False
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
        draft.started_bytes += len(token_ids) + len(block_ids) + request.sampling_bytes
        draft.chunks.append(Chunk(request, num_computed, length))
        draft.budget -= length
        self.prefilling.append(request)

    def _count_start(self, request: RequestState, num_tokens: int, hits: Hits) -> None:
        counters = self._metrics.counters
        num_cached = hits.num_tokens(self.kv.block_size)
        if self.kv.enable_prefix_caching:
            counters["prefix_cache_queries"] += num_tokens
            counters["prefix_cache_hits"] += num_cached
            counters["prefix_cache_host_hits"] += hits.num_on_host * self.kv.block_size
            counters["prefix_cache_copied_hits"] += hits.num_copied
        if request.started_at is None:
            request.started_at = self._clock()
            request.num_cached = num_cached
            self.meter.started()
            counters["started_requests"] += 1
            counters["prefix_cache_hit_requests"] += num_cached > 0
            self._metrics.histograms["request_queue_time_seconds"].observe(request.started_at - request.arrived_at)
        else:
            counters["recomputed_tokens"] += num_tokens - num_cached

    # -- restoring ------------------------------------------------------------------------------

    def is_restoring(self, request: RequestState) -> bool:
        return request.request_id in self._restores

    @property
    def num_restoring(self) -> int:
        return len(self._restores)

    def restore(self, request: RequestState, hits: Hits) -> None:
        """Let ``request``, which waits, wait for its blocks instead; the plan being written brings in the first."""
        self._waiting.take(request)
        missing = self.kv.reserve(request.blocks, hits, len(hits))
        restore = Restore(request, deque(missing), request.status)
        request.transition(RequestStatus.WAITING_KV)
        request.restored = True
        self._restores[request.request_id] = restore
        self._bring_in(restore)

    def continue_restores(self) -> None:
        """Those whose blocks earlier plans have brought in go back to wait for a slot; the others get more of theirs."""
        for restore in list(self._restores.values()):
            if restore.missing:
                self._bring_in(restore)
            else:
                self.give_up(restore.request)

    def _bring_in(self, restore: Restore) -> None:
        for _ in range(min(len(restore.missing), self.kv.num_swap_ins_left)):
            self.kv.swap_in(restore.request.blocks, restore.missing.popleft(), restore.request.tokens)

    def give_up(self, request: RequestState) -> None:
        """``request`` goes back into the waiting room. What has been brought in stays findable."""
        restore = self.drop(request)
        request.transition(restore.came_from)
        self._waiting.put_back(request)

    def drop(self, request: RequestState) -> Restore:
        """``request``, which is being restored, gives up its blocks."""
        restore = self._restores.pop(request.request_id)
        self.kv.unpin(request.blocks, restore.missing)
        self.kv.release(request.blocks)
        self._waiting.is_settled = False
        return restore

    def give_up_latest(self) -> bool:
        """Give up the restore that began last; False when there is none."""
        if not self._restores:
            return False
        self.give_up(next(reversed(self._restores.values())).request)
        return True

    def give_up_all(self) -> None:
        while self.give_up_latest():
            pass

    def pinned_keys(self) -> Iterator[bytes]:
        """Keys that the host must keep for requests being restored."""
        for restore in self._restores.values():
            for place in restore.missing:
                yield restore.request.blocks.keys[place]
