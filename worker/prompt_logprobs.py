"""Log-probabilities of prompt tokens, for the sequences that ask for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle

from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.steps import SlotLogprobs
from fastengine.worker.batch import PersistentBatch, StepRows
from fastengine.worker.sampler import top_logprobs
from fastengine.worker.sampling_table import SamplingTable

# Rows of logits computed at a time: they are the widest tensors there are.
ROWS_AT_ONCE = 128


class PromptLogprobs:
    """``logits_of`` turns hidden states ``[R, hidden]`` into float32 logits ``[R, vocab]``, which it may use again at its next call."""

    def __init__(self, batch: PersistentBatch, table: SamplingTable, logits_of: Callable[[paddle.Tensor], paddle.Tensor]):
        self._batch = batch
        self._table = table
        self._logits_of = logits_of

    def rows(self, rows: StepRows) -> list[int]:
        """The step's chunks whose tokens' log-probabilities are wanted."""
        chunks = np.arange(rows.num_decodes, rows.slots.size)
        return [int(row) for row in chunks[self._table.num_prompt_logprobs[rows.slots[chunks]] >= 0]]

    def collect(self, hidden: paddle.Tensor, rows: StepRows) -> list[SlotLogprobs]:
        """Of the prompt tokens that follow the positions this step computed; ``hidden [T, hidden]`` holds all of them."""
        found = []
        for row in self.rows(rows):
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            stop = min(start + int(rows.lengths[row]), int(self._batch.num_prompt[slot]) - 1)
            if stop > start:
                first = int(rows.lengths[:row].sum())
                found.append(SlotLogprobs(slot, self._of_next(hidden[first : first + stop - start], slot, start)))
        return found

    def _of_next(self, hidden: paddle.Tensor, slot: int, start: int) -> list[TopLogprobs]:
        entries: list[TopLogprobs] = []
        wanted = self._table.num_prompt_logprobs[slot]
        for done in range(0, hidden.shape[0], ROWS_AT_ONCE):
            part = hidden[done : done + ROWS_AT_ONCE]
            count = part.shape[0]
            next_ids = self._batch.tokens[slot, start + done + 1 : start + done + 1 + count]
            entries += top_logprobs(self._logits_of(part), next_ids, np.full(count, wanted))
        return entries
