"""Pooled hidden states: a sequence's embedding, gathered while its prompt is computed in chunks."""

from __future__ import annotations

import numpy as np
import paddle

from fastengine.protocol.steps import SlotEmbedding
from fastengine.worker.batch import PersistentBatch, StepRows
from fastengine.worker.sampling_table import POOLING_LAST, SamplingTable


class Pooler:
    """Owns the sums of the sequences whose prompts are under way."""

    def __init__(self, batch: PersistentBatch, table: SamplingTable):
        self._batch = batch
        self._table = table
        self._sums: dict[int, np.ndarray] = {}  # float64[hidden] by slot

    def pool(self, hidden: paddle.Tensor, rows: StepRows) -> list[SlotEmbedding]:
        """Take a step's hidden states ``[T, hidden]`` after the last norm; the embeddings of the prompts that this step ends.

        A prompt is computed from its first position on: none of it may come from the prefix cache.
        """
        pooling = self._table.pooling[rows.slots[rows.num_decodes :]]
        found = []
        for row in (pooling.nonzero()[0] + rows.num_decodes).tolist():
            slot, start, length = int(rows.slots[row]), int(rows.starts[row]), int(rows.lengths[row])
            num_prompt = int(self._batch.num_prompt[slot])
            if start >= num_prompt:
                continue
            first = int(rows.lengths[:row].sum())
            stop = first + min(length, num_prompt - start)
            is_last = start + length >= num_prompt
            if self._table.pooling[slot] == POOLING_LAST:
                vector = hidden[stop - 1].astype("float32").numpy() if is_last else None
            else:
                vector = self._mean(hidden[first:stop], slot, start, num_prompt if is_last else None)
            if vector is not None:
                found.append(SlotEmbedding(slot, vector.astype("<f4").tobytes()))
        return found

    def _mean(self, hidden: paddle.Tensor, slot: int, start: int, num_prompt: int | None) -> np.ndarray | None:
        """Add a chunk to its sequence's sum; the mean if the chunk is the last (``num_prompt`` given)."""
        total = hidden.astype("float32").sum(axis=0).numpy().astype(np.float64)
        if start > 0:
            total += self._sums[slot]
        self._sums[slot] = total
        return None if num_prompt is None else self._sums.pop(slot) / num_prompt
