"""SlotTable: the counters and tokens of running sequences, as arrays indexed by slot.

A slot is a row of the workers' persistent batch. For each::

    tokens      |<- num_computed ->| in flight |                      computed: planned, not necessarily done
                |<-- num_known ---->|                                 known: the engine has seen their values
    blocks      |------|------|------|                 capacity = blocks * block size
                                                end: most tokens it may have

A *decoding* slot computes one position a step: the one of the token it sampled last, known yet or not.
It needs the engine's attention only when that position reaches ``limit``: the end of its last block, or
the last position it may compute (``end - 2``: computing that samples the token at ``end - 1``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastengine.engine.request_state import RequestState, Tokens
from fastengine.protocol.tokens import pack_token_ids

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


NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
EMPTY_BATCH = DecodeBatch(np.empty(0, np.int64), b"", np.empty(0, np.int64), [], 0)


class SlotTable:
    """Owns the slots; the resource manager moves requests in and out."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int):
        self._block_size = block_size
        self._last_block = np.arange(-block_size, 0)  # positions of a table's last block before its capacity
        self.num_slots = num_slots
        # Pages of the token buffer are touched only as far as sequences reach.
        self.tokens: Tokens = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.flat_tokens: Tokens = self.tokens.reshape(-1)
        self.num_known: Index = np.zeros(num_slots, dtype=np.int64)
        self.num_computed: Index = np.zeros(num_slots, dtype=np.int64)
        self.capacity: Index = np.zeros(num_slots, dtype=np.int64)
        self.last_position: Index = np.zeros(num_slots, dtype=np.int64)
        self.limit: Index = np.zeros(num_slots, dtype=np.int64)
        self.handles: Index = np.zeros(num_slots, dtype=np.int64)
        self.clients: Index = np.zeros(num_slots, dtype=np.int64)
        self.requests: list[RequestState | None] = [None] * num_slots
        self._decoding = np.zeros(num_slots, dtype=np.bool_)
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

    def enter(self, request: RequestState, *, num_computed: int, capacity: int) -> int:
        """Give ``request`` a free slot and move its tokens there."""
        slot = self._free.pop()
        known = len(request.tokens)
        self.tokens[slot, :known] = request.tokens
        request.tokens = NO_TOKENS
        self.num_known[slot] = known
        self.num_computed[slot] = num_computed
        self.capacity[slot] = capacity
        self.last_position[slot] = request.end - 2
        self.handles[slot] = request.request.handle
        self.clients[slot] = request.request.client_index
        self.requests[slot] = request
        request.slot = slot
        return slot

    def leave(self, request: RequestState) -> None:
        """Take ``request`` out, its known tokens with it; the slot is free for the next plan."""
        slot = request.slot
        request.tokens = self.tokens[slot, : self.num_known[slot]].copy()
        request.slot = -1
        self.requests[slot] = None
        self.stop_decoding(slot)
        self._free.append(slot)
        self._released.append(slot)

    def start_decoding(self, slot: int) -> None:
        self.limit[slot] = min(self.capacity[slot], self.last_position[slot])
        self._decoding[slot] = True
        self._batch = None

    def stop_decoding(self, slot: int) -> None:
        if self._decoding[slot]:
            self._decoding[slot] = False
            self._batch = None

    def grow(self, slots: Index) -> None:
        """Each of ``slots`` (no repeats) has gained one block."""
        capacity = self.capacity[slots] + self._block_size
        self.capacity[slots] = capacity
        self.limit[slots] = np.minimum(capacity, self.last_position[slots])

    def last_block_tokens(self, slots: Index) -> bytes:
        """int32[n, block_size]: the tokens in the last block of each slot, as bytes."""
        starts = slots * self.tokens.shape[1] + self.capacity[slots]
        return self.flat_tokens[starts[:, None] + self._last_block].tobytes()

    def decode_batch(self) -> DecodeBatch:
        """All slots that decode now; the same object until the set changes."""
        if self._batch is None:
            self._batch = self._build_batch()
        return self._batch

    def _build_batch(self) -> DecodeBatch:
        slots = self._decoding.nonzero()[0]
        if len(slots) == 0:
            return EMPTY_BATCH
        return DecodeBatch(slots, pack_token_ids(slots), slots * self.tokens.shape[1], self.columns_of(slots), len(slots))

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

    def num_known_of(self, request: RequestState) -> int:
        """Known tokens of a request in any state."""
        return int(self.num_known[request.slot]) if request.slot >= 0 else len(request.tokens)

    def append(self, slot: int, token_id: int) -> int:
        """One more known token; returns how many there are."""
        known = int(self.num_known[slot])
        self.tokens[slot, known] = token_id
        self.num_known[slot] = known + 1
        return known + 1

    def take_released(self) -> bytes:
        """int32[n]: slots left since the last call, for the next plan."""
        if not self._released:
            return b""
        released, self._released = self._released, []
        return pack_token_ids(released)

    def forget_released(self) -> None:
        """The workers that knew the released slots are gone."""
        self._released = []
