"""SlotTable: the counters and tokens of running sequences, indexed by slot.

A slot is a row of the workers' persistent batch. For each::

    tokens      |<-- computed ---->| in flight |                      computed: planned, not necessarily done
                |<-- known ------->|                                  known: the engine has seen their values
    blocks      |------|------|------|                 capacity = blocks * block size
                                                end: most tokens it may have

A *decoding* slot computes one position a step: the one of the token it sampled last, known yet or not.
It needs the engine's attention only when that position reaches its *limit*: the end of its last block, or
the last position it may compute (``end - 2``: computing that samples the token at ``end - 1``).

All decoding slots advance together, so they share one clock, ``tick``: a slot's position is ``tick`` plus its
own constant, and a calendar says which slots reach their limit at which tick. Planning a step of plain
decoding costs nothing per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastengine.cache.kv_cache_manager import SequenceBlocks
from fastengine.engine.request_state import RequestState, Tokens
from fastengine.protocol.steps import MAX_RUN_STEPS
from fastengine.protocol.tokens import pack_token_ids
from fastengine.sampling_rules import is_plain

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClientColumn:
    """The rows of a batch that belong to one API process."""

    client_index: int
    handles: bytes  # int64[n]
    rows: Index | None  # None: all rows of the batch


@dataclass(frozen=True)
class DecodeBatch:
    """The slots that decode, ascending, with everything that changes only when the set changes."""

    slots: Index
    packed: bytes  # int32[n]: the same for the wire
    token_base: Index  # where each slot's tokens start in the flat token buffer
    columns: list[ClientColumn]
    size: int
    is_plain: bool  # all of them sample plainly (see sampling_rules.is_plain)


NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
NO_ROWS: Index = np.empty(0, dtype=np.int64)
EMPTY_BATCH = DecodeBatch(NO_ROWS, b"", NO_ROWS, [], 0, False)
RUN_OFFSETS = np.arange(MAX_RUN_STEPS, dtype=np.int64)[:, None]


class SlotTable:
    """Owns the slots; the resource manager moves requests in and out."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int):
        self._block_size = block_size
        self.num_slots = num_slots
        # One column more than the model's length: the token sampled at its last position. Pages are touched only as far as sequences reach.
        self.tokens: Tokens = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self._flat_tokens: Tokens = self.tokens.reshape(-1)
        self.handles: Index = np.zeros(num_slots, dtype=np.int64)
        self.clients: Index = np.zeros(num_slots, dtype=np.int64)
        self.requests: list[RequestState | None] = [None] * num_slots
        self.capacity = [0] * num_slots
        self.last_position = [0] * num_slots
        # Computed tokens: this, plus ``tick`` while the slot decodes.
        self._computed = [0] * num_slots
        self._tick = 0
        self._due: dict[int, dict[int, None]] = {}  # tick -> decoding slots that reach their limit then
        # Known tokens; the open batch's rows have _num_pending more.
        self._known: Index = np.zeros(num_slots, dtype=np.int64)
        self._open_batch: DecodeBatch | None = None
        self._write_at: Index = NO_ROWS  # where the next token of each of its rows goes in the flat buffer
        self._num_pending = 0
        self._decoding = np.zeros(num_slots, dtype=np.bool_)
        self._is_plain = np.zeros(num_slots, dtype=np.bool_)
        self._alive = np.ones(num_slots, dtype=np.bool_)  # scratch of alive_rows(), all true in between
        self._free = list(range(num_slots - 1, -1, -1))
        self._released: list[int] = []
        self._batch: DecodeBatch | None = EMPTY_BATCH

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def running(self) -> list[RequestState]:
        return [request for request in self.requests if request is not None]

    # -- in and out -----------------------------------------------------------------------------

    def enter(self, request: RequestState, *, num_computed: int, capacity: int) -> int:
        """Give ``request`` a free slot and move its tokens there."""
        slot = self._free.pop()
        known = len(request.tokens)
        self.tokens[slot, :known] = request.tokens
        request.tokens = NO_TOKENS
        self._settle_known()
        self._known[slot] = known
        self._computed[slot] = num_computed
        self.capacity[slot] = capacity
        self.last_position[slot] = request.end - 2
        self.handles[slot] = request.request.handle
        self.clients[slot] = request.request.client_index
        self.requests[slot] = request
        self._is_plain[slot] = is_plain(request.request.sampling)
        request.slot = slot
        return slot

    def leave(self, request: RequestState) -> None:
        """Take ``request`` out, its known tokens with it; the slot is free for the next plan."""
        slot = request.slot
        request.tokens = self.tokens[slot, : self.num_known(slot)].copy()
        request.slot = -1
        self.requests[slot] = None
        self.stop_decoding(slot)
        self._free.append(slot)
        self._released.append(slot)

    def take_released(self) -> bytes:
        """int32[n]: slots left since the last call, for the next plan."""
        if not self._released:
            return b""
        released, self._released = self._released, []
        return pack_token_ids(released)

    def forget_released(self) -> None:
        """The workers that knew the released slots are gone."""
        self._released = []

    # -- computed positions ---------------------------------------------------------------------

    def num_computed(self, slot: int) -> int:
        """Positions of ``slot`` that a plan has computed."""
        return self._computed[slot] + (self._tick if self._decoding[slot] else 0)

    def set_computed(self, slot: int, num_computed: int) -> None:
        """For a slot that doesn't decode."""
        self._computed[slot] = num_computed

    def start_decoding(self, slot: int) -> None:
        self._decoding[slot] = True
        self._computed[slot] -= self._tick
        self._due.setdefault(self._limit_at(slot), {})[slot] = None
        self._batch = None

    def stop_decoding(self, slot: int) -> None:
        if self._decoding[slot]:
            self._decoding[slot] = False
            at = self._limit_at(slot)
            due = self._due[at]
            del due[slot]
            if not due:
                del self._due[at]
            self._computed[slot] += self._tick
            self._batch = None

    def due(self) -> list[int]:
        """Decoding slots whose next position is their limit."""
        return list(self._due.get(self._tick, ()))

    def full(self, due: list[int]) -> list[int]:
        """Those slots of :meth:`due` whose next position lies behind their last block."""
        computed, tick, capacity = self._computed, self._tick, self.capacity
        return [slot for slot in due if computed[slot] + tick >= capacity[slot]]

    def advance(self, due: list[int]) -> list[int]:
        """Every decoding slot computes one more position. ``due``: those of :meth:`due`, grown where full.

        Returns those of them that have computed their last position; they no longer decode.
        """
        ended = []
        if due:
            computed, tick, capacity, last_position = self._computed, self._tick, self.capacity, self.last_position
            del self._due[tick]
            filled_at = tick + self._block_size  # when most of them will have filled the block they have just gained
            filled = self._due.setdefault(filled_at, {})
            for slot in due:
                last = last_position[slot]
                start = computed[slot]
                if start + tick == last:
                    ended.append(slot)
                elif (at := min(capacity[slot], last) - start) == filled_at:
                    filled[slot] = None
                else:
                    self._due.setdefault(at, {})[slot] = None
            if not filled:
                del self._due[filled_at]
            for slot in ended:
                self._decoding[slot] = False
                computed[slot] += tick + 1
                self._batch = None
        self._tick += 1
        return ended

    def advance_freely(self, most: int) -> int:
        """Every decoding slot computes up to ``most`` more positions, as long as none reaches its limit; returns how many."""
        count = 0
        while count < most and self._tick not in self._due:
            self._tick += 1
            count += 1
        return count

    def retreat(self, count: int) -> None:
        """The last ``count`` positions that every decoding slot advanced freely have not been computed. None may have begun to decode since."""
        self._tick -= count

    def _limit_at(self, slot: int) -> int:
        """The tick at which a decoding slot reaches its limit."""
        return min(self.capacity[slot], self.last_position[slot]) - self._computed[slot]

    def grow(self, full: list[int]) -> list[SequenceBlocks]:
        """Each of these slots gains one block; returns the blocks of each."""
        sequences = []
        for slot in full:
            request = self.requests[slot]
            assert request is not None
            sequences.append(request.blocks)
            self.capacity[slot] += self._block_size
        return sequences

    def check(self) -> None:
        """Raise AssertionError unless the calendar has every decoding slot at its limit, and nothing else."""
        expected: dict[int, set[int]] = {}
        for slot in self._decoding.nonzero()[0].tolist():
            expected.setdefault(self._limit_at(slot), set()).add(slot)
        calendar = {at: set(slots) for at, slots in self._due.items()}
        assert calendar == expected, f"tick {self._tick}: the calendar has {calendar}, should have {expected}"

    # -- known tokens ---------------------------------------------------------------------------

    def num_known(self, slot: int) -> int:
        self._settle_known()
        return int(self._known[slot])

    def num_known_of(self, request: RequestState) -> int:
        """Known tokens of a request in any state."""
        return self.num_known(request.slot) if request.slot >= 0 else len(request.tokens)

    def tokens_of(self, request: RequestState) -> Tokens:
        """A copy of the known tokens of a request in any state."""
        slot = request.slot
        return self.tokens[slot, : self.num_known(slot)].copy() if slot >= 0 else request.tokens.copy()

    def append(self, slot: int, token_id: int) -> int:
        """One more known token; returns how many there are."""
        known = self.num_known(slot)
        self.tokens[slot, known] = token_id
        self._known[slot] = known + 1
        return known + 1

    def append_all(self, batch: DecodeBatch, token_ids: Tokens) -> None:
        """One more known token (int32[n]) for every row of ``batch``, or N more (int32[N, n])."""
        if batch is not self._open_batch:
            self._settle_known()
            self._open_batch = batch
            self._write_at = batch.token_base + self._known[batch.slots]
        count = 1
        if token_ids.ndim == 1:
            self._flat_tokens[self._write_at] = token_ids
        else:
            count = len(token_ids)
            self._flat_tokens[self._write_at + RUN_OFFSETS[:count]] = token_ids
        self._write_at += count
        self._num_pending += count

    def append_some(self, batch: DecodeBatch, rows: Index, token_ids: Tokens) -> None:
        """One more known token for these rows of ``batch``."""
        self._settle_known()
        self._open_batch = None
        at = batch.slots[rows]
        known = self._known[at]
        self._flat_tokens[batch.token_base[rows] + known] = token_ids
        self._known[at] = known + 1

    def _settle_known(self) -> None:
        if self._num_pending:
            assert self._open_batch is not None
            self._known[self._open_batch.slots] += self._num_pending
            self._num_pending = 0

    # -- the batch ------------------------------------------------------------------------------

    def decode_batch(self) -> DecodeBatch:
        """All slots that decode now; the same object until the set changes."""
        if self._batch is None:
            self._batch = self._build_batch()
        return self._batch

    def _build_batch(self) -> DecodeBatch:
        slots = self._decoding.nonzero()[0]
        if len(slots) == 0:
            return EMPTY_BATCH
        token_base = slots * self.tokens.shape[1]
        return DecodeBatch(slots, pack_token_ids(slots), token_base, self.columns_of(slots), len(slots), bool(self._is_plain[slots].all()))

    def columns_of(self, slots: Index) -> list[ClientColumn]:
        """``slots`` split by API process."""
        if len(slots) == 0:
            return []
        clients = self.clients[slots]
        handles = self.handles[slots]
        if (clients == clients[0]).all():
            return [ClientColumn(int(clients[0]), handles.tobytes(), None)]
        columns = []
        for client in np.unique(clients).tolist():
            rows = (clients == client).nonzero()[0]
            columns.append(ClientColumn(client, handles[rows].tobytes(), rows))
        return columns

    def alive_rows(self, slots: Index, dead: list[int]) -> npt.NDArray[np.bool_]:
        """bool[n]: which of ``slots`` are not among ``dead``."""
        self._alive[dead] = False
        rows = self._alive[slots]
        self._alive[dead] = True
        return rows
