"""From logits to tokens, for all rows of a step at once.

Order, as each stage sees the one before's result::

    raw logits --> penalties --> logit_bias, min_tokens, bad_words --> grammar --> temperature --> top-k, top-p, min-p, draw
        |                                                                              |
        +--> log-softmax: "raw" log-probabilities              "processed" log-probabilities

Where min_tokens and bad_words leave no token that the grammar allows, the grammar wins. A row's draw depends on its own logits, seed and position alone, never on who else is in the batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import paddle

from fastengine import custom_ops
from fastengine.custom_ops.cuda.ops import apply_bitmask
from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.steps import SlotLogprobs
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.row_problems import RowProblem, grammar_problem, settings_problem
from fastengine.worker.sampling_table import SamplingTable, SlotRules

logger = logging.getLogger(__name__)

FORBIDDEN = np.float32(-np.inf)
# What operators and numpy raise for a value they can't take. Anything else is no row's fault.
ROW_ERRORS = (ValueError, OverflowError, IndexError, TypeError)


@dataclass
class Sampled:
    """``token_ids`` int32[R], drawn from ``logits`` float32[R, vocab].

    ``errors`` says of a row why its sequence can't go on: its token means nothing.
    """

    token_ids: np.ndarray
    logits: paddle.Tensor
    errors: dict[int, RowProblem] = field(default_factory=dict)


class Sampler:
    """Reads the slots' parameters from ``table`` and their tokens from ``batch``."""

    def __init__(self, table: SamplingTable, batch: PersistentBatch, logprobs_mode: Literal["raw", "processed"] = "raw"):
        self._table = table
        self._batch = batch
        self._processed = logprobs_mode == "processed"

    def sample(self, logits: paddle.Tensor, slots: np.ndarray) -> Sampled:
        """Tokens from float32 ``logits[R, vocab]`` (left as they are) of ``slots`` (``int32[R]``).

        A row whose parameters an operator refuses has an error in the result; the others are sampled.
        """
        try:
            return self._sample(logits, slots)
        except ROW_ERRORS:
            logger.exception("a step's rows could not be sampled together: each is sampled alone")
            return self._sample_one_by_one(logits, slots)

    def _sample_one_by_one(self, logits: paddle.Tensor, slots: np.ndarray) -> Sampled:
        token_ids, rows = np.zeros(slots.size, np.int32), []
        errors: dict[int, RowProblem] = {}
        for row in range(slots.size):
            try:
                drawn = self._sample(logits[row : row + 1], slots[row : row + 1])
            except ROW_ERRORS as error:
                errors[row] = settings_problem(error)
                rows.append(logits[row : row + 1])
            else:
                token_ids[row] = drawn.token_ids[0]
                if 0 in drawn.errors:
                    errors[row] = drawn.errors[0]
                rows.append(drawn.logits)
        return Sampled(token_ids, paddle.concat(rows), errors)

    def _sample(self, logits: paddle.Tensor, slots: np.ndarray) -> Sampled:
        """:meth:`sample`, all or nothing: until it has succeeded no grammar has moved on."""
        table = self._table
        if not table.adjusted[slots].any():
            return Sampled(self._draw(logits, slots), logits)
        constrained = np.flatnonzero(table.constrained[slots])
        if constrained.size == 0:
            adjusted = self._adjusted(logits, slots, {})
            return Sampled(self._draw(adjusted, slots), adjusted)
        return self._sample_constrained(logits, slots, constrained.tolist())

    def _draw(self, logits: paddle.Tensor, slots: np.ndarray) -> np.ndarray:
        table = self._table
        temperature = table.temperature[slots]
        if not temperature.any():
            return custom_ops.argmax(logits).numpy()
        columns = (table.top_k, table.top_p, table.min_p, table.seed, self._batch.num_tokens)
        drawn = custom_ops.sample(logits, _tensor(temperature), *(_tensor(column[slots]) for column in columns))
        return drawn.numpy()

    def _sample_constrained(self, logits: paddle.Tensor, slots: np.ndarray, rows: list[int]) -> Sampled:
        """As :meth:`_sample`; ``rows`` follow a grammar (or a reasoning budget)."""
        grammars = self._table.grammars
        assert grammars is not None  # the table constrains no slot otherwise
        masks = grammars.masks([int(slots[row]) for row in rows])
        allowed = dict(zip(rows, masks.allowed, strict=True))
        errors = {rows[i]: grammar_problem(message) for i, message in masks.errors.items()}
        adjusted = forbid(self._adjusted(logits, slots, allowed), rows, masks.allowed)
        token_ids = self._draw(adjusted, slots)
        for row in rows:
            if row not in errors:
                problem = grammars.advance(int(slots[row]), int(token_ids[row]))
                if problem is not None:
                    errors[row] = grammar_problem(problem)
        return Sampled(token_ids, adjusted, errors)

    def logprobs(self, logits: paddle.Tensor, slots: np.ndarray, drawn: Sampled) -> list[SlotLogprobs]:
        """The sampled tokens' and the top k's log-probabilities, of the rows that ask for them. ``logits`` are the raw ones."""
        wanted = self._table.num_logprobs[slots]
        if drawn.errors:
            wanted[list(drawn.errors)] = -1
        rows = np.flatnonzero(wanted >= 0)
        if rows.size == 0:
            return []
        chosen = drawn.logits if self._processed else logits
        if rows.size != slots.size:
            chosen = paddle.index_select(chosen, paddle.to_tensor(rows))
        if self._processed:
            temperature = self._table.temperature[slots[rows]]
            chosen = chosen / _tensor(np.where(temperature > 0, temperature, np.float32(1))[:, np.newaxis])
        entries = top_logprobs(chosen, drawn.token_ids[rows], wanted[rows])
        return [SlotLogprobs(slot, [entry]) for slot, entry in zip(slots[rows].tolist(), entries, strict=True)]

    def _adjusted(self, logits: paddle.Tensor, slots: np.ndarray, allowed: dict[int, np.ndarray]) -> paddle.Tensor:
        """A copy with penalties and rules applied; rows without any are unchanged. ``allowed`` are the constrained rows' masks."""
        table, batch = self._table, self._batch
        tokens: list[np.ndarray] = []
        bias_ids: list[np.ndarray] = []
        bias_values: list[np.ndarray] = []
        num_rows = slots.size
        token_counts, bias_counts, prompt_lengths = np.zeros((3, num_rows), dtype=np.int32)
        for row in np.flatnonzero(table.penalized[slots]).tolist():
            slot = int(slots[row])
            tokens.append(batch.tokens[slot, : batch.num_tokens[slot]])
            token_counts[row], prompt_lengths[row] = batch.num_tokens[slot], batch.num_prompt[slot]
        for row in np.flatnonzero(table.has_rules[slots]).tolist():
            ids, values = rule_biases(batch, table.rules[int(slots[row])], int(slots[row]), allowed.get(row))
            bias_ids.append(ids)
            bias_values.append(values)
            bias_counts[row] = ids.size
        row_starts, bias_starts = starts_of(token_counts), starts_of(bias_counts)
        adjusted = logits.clone()
        custom_ops.apply_penalties(
            adjusted,
            *(_tensor(column[slots]) for column in (table.repetition_penalty, table.presence_penalty, table.frequency_penalty)),
            _tensor(joined(tokens, np.int32)),
            _tensor(row_starts),
            _tensor(row_starts[:-1] + prompt_lengths),
            _tensor(joined(bias_ids, np.int32)),
            _tensor(joined(bias_values, np.float32)),
            _tensor(bias_starts),
        )
        return adjusted


def rule_biases(batch: PersistentBatch, rules: SlotRules, slot: int, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """What the rules add to which tokens' logits now: ``int32[n]`` ids and ``float32[n]`` values. ``allowed`` is a constrained row's mask."""
    length, num_prompt = int(batch.num_tokens[slot]), int(batch.num_prompt[slot])
    forbidden = [rules.end_ids] if length - num_prompt < rules.min_tokens else []
    if rules.bad_words:
        forbidden.append(forbidden_next(rules.bad_words, batch.tokens[slot, num_prompt:length], batch.vocab_size))
    if allowed is not None and forbidden:
        left = allowed.copy()
        left[np.concatenate(forbidden)] = False
        if not left.any():
            forbidden = []
    ids = np.concatenate([rules.bias_ids, *forbidden])
    values = np.full(ids.size, FORBIDDEN, dtype=np.float32)
    values[: rules.bias_ids.size] = rules.bias_values
    return ids, values


def forbid(logits: paddle.Tensor, rows: list[int], allowed: np.ndarray) -> paddle.Tensor:
    """``logits`` float32[R, vocab] (contiguous; may be changed) with -inf where ``allowed`` bool[n, vocab] of ``rows[n]`` is False."""
    if logits.place.is_cpu_place():
        values = np.from_dlpack(logits)  # the same memory: a new [R, vocab] would cost more than all else here
        for row, mask in zip(rows, allowed, strict=True):
            np.copyto(values[row], FORBIDDEN, where=~mask)
        return logits
    apply_bitmask(logits, paddle.to_tensor(bitmask(allowed)), paddle.to_tensor(np.array(rows, np.int32)))
    return logits


def bitmask(allowed: np.ndarray) -> np.ndarray:
    """bool ``[n, vocab]`` as int32 ``[n, ceil(vocab / 32)]``: bit v % 32 of word v // 32."""
    packed = np.packbits(allowed, axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view("<i4")


def _tensor(values: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(values)


def joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def starts_of(counts: np.ndarray) -> np.ndarray:
    """Where each row begins in the rows laid end to end: ``int32[R + 1]``."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def forbidden_next(bad_words: tuple[tuple[int, ...], ...], output: np.ndarray, vocab_size: int) -> np.ndarray:
    """The tokens that would complete one of ``bad_words`` after ``output``, ``int32[n]`` without repeats."""
    found: set[int] = set()
    for word in bad_words:
        begin, last = word[:-1], word[-1:]
        if len(begin) > output.size or not last or not 0 <= last[0] < vocab_size:
            continue
        if not begin or output[output.size - len(begin) :].tolist() == list(begin):
            found.add(last[0])
    return np.array(sorted(found), dtype=np.int32)


def top_logprobs(logits: paddle.Tensor, token_ids: np.ndarray, wanted: np.ndarray) -> list[TopLogprobs]:
    """One entry per row of ``logits[R, vocab]``: ``token_ids[R]``'s, and the ``wanted[r]`` most likely, best first."""
    most = int(wanted.max())
    own, ranks, top_ids, top_values = (
        output.numpy() for output in custom_ops.log_softmax_gather(logits, paddle.to_tensor(token_ids.astype(np.int32)), most)
    )
    return [
        TopLogprobs(logprob, rank, ids[:count], values[:count])
        for logprob, rank, ids, values, count in zip(
            own.tolist(), ranks.tolist(), top_ids.tolist(), top_values.tolist(), wanted.tolist(), strict=True
        )
    ]
