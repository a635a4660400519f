"""Sampling inside the fused step: the slots' parameters for its operator, and what it returns as results.

The rules and their order are those of :mod:`fastengine.worker.sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastengine.custom_ops.fused_sampling import Adjustments, Draws, RowLogprobs, RowSampling, TokenMasks
from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.steps import SlotLogprobs
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.grammar import Masks
from fastengine.worker.row_problems import RowProblem, grammar_problem, settings_problem
from fastengine.worker.sampler import ROW_ERRORS, joined, rule_biases, starts_of
from fastengine.worker.sampling_table import SamplingTable


@dataclass
class PreparedSampling:
    """``rows`` for the operator; ``errors`` says of a row why its sequence can't go on: its token means nothing."""

    rows: RowSampling
    slots: np.ndarray
    constrained: np.ndarray  # rows that follow a grammar
    errors: dict[int, RowProblem] = field(default_factory=dict)


class FusedSampler:
    """Reads the slots' parameters from ``table`` and their tokens from ``batch``."""

    def __init__(self, table: SamplingTable, batch: PersistentBatch, *, processed_logprobs: bool):
        self._table = table
        self._batch = batch
        self._processed_logprobs = processed_logprobs

    def prepare(self, slots: np.ndarray) -> PreparedSampling:
        """For rows of ``slots`` int32[R], before the step that they are sampled in."""
        table = self._table
        draws = Draws(
            table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots], table.seed[slots], self._batch.num_tokens[slots]
        )
        wanted = table.num_logprobs[slots]
        logprobs = RowLogprobs(wanted, from_processed=self._processed_logprobs) if (wanted >= 0).any() else None
        if not table.adjusted[slots].any():
            return PreparedSampling(RowSampling(draws, logprobs=logprobs), slots, np.empty(0, np.int64))
        constrained = np.flatnonzero(table.constrained[slots])
        errors: dict[int, RowProblem] = {}
        masks, token_masks = None, None
        if constrained.size:
            assert table.grammars is not None  # the table constrains no slot otherwise
            masks = table.grammars.masks(slots[constrained].tolist())
            errors = {int(constrained[i]): grammar_problem(message) for i, message in masks.errors.items()}
            token_masks = TokenMasks(masks.allowed, np.full(slots.size, -1, np.int32))
            token_masks.mask_of[constrained] = np.arange(constrained.size, dtype=np.int32)
        adjustments = self._adjustments(slots, constrained, masks, errors)
        return PreparedSampling(RowSampling(draws, adjustments, token_masks, logprobs), slots, constrained, errors)

    def finish(self, prepared: PreparedSampling, token_ids: np.ndarray) -> list[SlotLogprobs]:
        """Move grammars on by the drawn ``token_ids`` int32[R], and collect log-probabilities."""
        grammars, errors = self._table.grammars, prepared.errors
        for row in prepared.constrained.tolist():
            if row not in errors:
                assert grammars is not None
                problem = grammars.advance(int(prepared.slots[row]), int(token_ids[row]))
                if problem is not None:
                    errors[row] = grammar_problem(problem)
        logprobs = prepared.rows.logprobs
        if logprobs is None:
            return []
        found = []
        for row in np.flatnonzero(logprobs.wanted >= 0).tolist():
            if row not in errors:
                count = int(logprobs.wanted[row])
                top = logprobs.top_ids[row, :count].tolist(), logprobs.top_logprobs[row, :count].tolist()
                entry = TopLogprobs(float(logprobs.logprobs[row]), int(logprobs.ranks[row]), *top)
                found.append(SlotLogprobs(int(prepared.slots[row]), [entry]))
        return found

    def _adjustments(self, slots: np.ndarray, constrained: np.ndarray, masks: Masks | None, errors: dict[int, RowProblem]) -> Adjustments:
        table, batch = self._table, self._batch
        allowed = {} if masks is None else dict(zip(constrained.tolist(), masks.allowed, strict=True))
        ids: list[np.ndarray] = []
        values: list[np.ndarray] = []
        counts = np.zeros(slots.size, np.int32)
        for row in np.flatnonzero(table.has_rules[slots]).tolist():
            slot = int(slots[row])
            try:
                row_ids, row_values = rule_biases(batch, table.rules[slot], slot, allowed.get(row))
            except ROW_ERRORS as error:
                errors[row] = settings_problem(error)
                continue
            ids.append(row_ids)
            values.append(row_values)
            counts[row] = row_ids.size
        starts = slots.astype(np.int32) * np.int32(batch.tokens.shape[1])
        return Adjustments(
            table.repetition_penalty[slots],
            table.presence_penalty[slots],
            table.frequency_penalty[slots],
            batch.tokens,
            starts,
            starts + batch.num_tokens[slots],
            starts + batch.num_prompt[slots],
            joined(ids, np.int32),
            joined(values, np.float32),
            starts_of(counts),
        )
