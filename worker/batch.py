"""The persistent batch: what the worker knows of every slot between steps.

One row per slot in a few flat arrays, so that a step's inputs are built by vector operations however
many sequences run. The engine decides everything; this module only applies its differences::

    tokens[slot]  | prompt ......... | output .......... |            max_model_len + 1
                  0                  num_prompt          num_tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import paddle

from fastengine.protocol.steps import RowError, StartedSequence, StepPlan
from fastengine.worker.row_problems import INTERNAL
from fastengine.worker.step_inputs import StepInputs

INT32 = np.dtype("<i4")


def int32(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, dtype=INT32)


@dataclass(frozen=True)
class StepRows:
    """The rows of one step as numpy arrays, decodes first, then chunks, in the plan's order."""

    slots: np.ndarray  # int32[S]
    starts: np.ndarray  # int32[S]: first position computed
    lengths: np.ndarray  # int32[S]: positions computed
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class StepArrays(NamedTuple):
    """:class:`StepInputs` as numpy arrays, all of them contiguous int32."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray


class PersistentBatch:
    """Tokens, lengths and block tables of all slots."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int):
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.vocab_size = vocab_size
        max_blocks = -(-max_model_len // block_size)
        # One column more than a sequence may have: a step run ahead of the engine's length check still fits.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        # One more than the highest block that was named since the KV memory was taken.
        self.num_blocks_reached = 0
        self.occupied = np.zeros(max_num_seqs, dtype=bool)
        # Slots whose sequence could not go on; their rows are left out until the engine releases them.
        self.failed = np.zeros(max_num_seqs, dtype=bool)

    def release(self, slots: np.ndarray) -> None:
        self.occupied[slots] = False
        self.failed[slots] = False
        self.num_tokens[slots] = 0
        self.num_blocks[slots] = 0

    def start(self, sequence: StartedSequence) -> RowError | None:
        """Take a sequence into its slot; an error means it can't run and is marked as failed."""
        slot = sequence.slot
        token_ids, blocks = int32(sequence.token_ids), int32(sequence.block_ids)
        self.occupied[slot] = True
        problem = ""
        if token_ids.size >= self.tokens.shape[1]:
            problem = f"a sequence of {token_ids.size} tokens exceeds the {self.tokens.shape[1] - 1} a slot holds"
        elif token_ids.size == 0 or int(token_ids.min()) < 0 or int(token_ids.max()) >= self.vocab_size:
            problem = f"token ids must be in [0, {self.vocab_size}) and at least one"
        elif blocks.size > self.block_table.shape[1]:
            problem = f"{blocks.size} blocks exceed the {self.block_table.shape[1]} a slot holds"
        if problem:
            self.failed[slot] = True
            return RowError(slot, INTERNAL, f"{sequence.request_id}: {problem}")
        self.tokens[slot, : token_ids.size] = token_ids
        self.num_tokens[slot] = token_ids.size
        self.num_prompt[slot] = sequence.num_prompt
        self.block_table[slot, : blocks.size] = blocks
        self.num_blocks[slot] = blocks.size
        self._reach(blocks)
        return None

    def grow(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """Append ``blocks[i]`` to the table of ``slots[i]``, in order; a slot may repeat."""
        self._reach(blocks)
        if len(set(slots.tolist())) == len(slots):
            self.block_table[slots, self.num_blocks[slots]] = blocks
            self.num_blocks[slots] += 1
            return
        for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
            self.block_table[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1

    def _reach(self, blocks: np.ndarray) -> None:
        self.num_blocks_reached = max(self.num_blocks_reached, int(blocks.max(initial=-1)) + 1)

    def rows(self, plan: StepPlan) -> tuple[StepRows, list[RowError]]:
        """The plan's rows without those that can't run, and why those can't (reported once)."""
        decodes, chunks = int32(plan.decodes), int32(plan.chunk_slots)
        slots = np.concatenate([decodes, chunks])
        starts = np.concatenate([self.num_tokens[decodes] - 1, int32(plan.chunk_starts)])
        lengths = np.concatenate([np.ones_like(decodes), int32(plan.chunk_lengths)])
        ends = starts + lengths
        good = self.occupied[slots] & (starts >= 0) & (lengths > 0)
        good &= (ends <= self.num_tokens[slots]) & (ends <= self.num_blocks[slots] * self.block_size)
        bad = slots[~good & ~self.failed[slots]]
        errors = [RowError(slot, INTERNAL, self._why_not(slot)) for slot in bad.tolist()]
        self.failed[bad] = True
        good &= ~self.failed[slots]
        if not good.all():
            num_decodes = int(good[: decodes.size].sum())
            return StepRows(slots[good], starts[good], lengths[good], num_decodes), errors
        return StepRows(slots, starts, lengths, decodes.size), errors

    def inputs(self, rows: StepRows) -> StepInputs:
        """The forward pass's tensors for ``rows`` (at least one)."""
        return StepInputs(*(paddle.to_tensor(array) for array in self.arrays(rows)))

    def arrays(self, rows: StepRows) -> StepArrays:
        """What a forward pass over ``rows`` (at least one) reads."""
        ends = rows.starts + rows.lengths
        query_starts = np.zeros(rows.slots.size + 1, dtype=np.int32)
        np.cumsum(rows.lengths, out=query_starts[1:])
        if rows.num_decodes == rows.slots.size:
            slot_of_token, positions = rows.slots, rows.starts
        else:
            slot_of_token = np.repeat(rows.slots, rows.lengths)
            positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(rows.starts - query_starts[:-1], rows.lengths)
        blocks = self.block_table[slot_of_token, positions // self.block_size]
        table_width = -(-int(ends.max()) // self.block_size)
        return StepArrays(
            token_ids=self.tokens[slot_of_token, positions],
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_starts=query_starts,
            context_lens=ends,
            block_tables=self.block_table[rows.slots, :table_width],
        )

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Add one sampled token to each slot."""
        self.tokens[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def _why_not(self, slot: int) -> str:
        if not self.occupied[slot]:
            return f"slot {slot} holds no sequence"
        room = int(self.num_blocks[slot]) * self.block_size
        return f"the step asks for positions past slot {slot}'s {int(self.num_tokens[slot])} tokens or {room} positions of KV"
