"""A plan's steps: its differences into the persistent batch, a forward pass, tokens out.

The runner keeps the bookkeeping; an executor does the computing. Real models run in
:class:`ModelExecutor`; :class:`NullExecutor` computes nothing, so that everything around a model can be
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import paddle
from paddle.profiler import RecordEvent

from fastengine.protocol.steps import RowError, SlotEmbedding, SlotLogprobs, StepPlan, StepResult
from fastengine.worker.batch import PersistentBatch, StepRows, int32
from fastengine.worker.kv_cache import KVCache
from fastengine.worker.models.llama import LlamaForCausalLM
from fastengine.worker.pooling import Pooler
from fastengine.worker.prompt_logprobs import PromptLogprobs
from fastengine.worker.row_problems import NOT_FINITE, RowProblem
from fastengine.worker.run_cut import RunCut
from fastengine.worker.sampler import Sampler
from fastengine.worker.sampling_table import SamplingTable

NULL_TOKEN = 5


@dataclass
class Executed:
    """``token_ids[i]`` is the token of the i-th sampling row."""

    token_ids: np.ndarray
    logprobs: list[SlotLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SlotLogprobs] = field(default_factory=list)
    embeddings: list[SlotEmbedding] = field(default_factory=list)
    # Sampling rows without a usable token.
    bad_rows: dict[int, RowProblem] = field(default_factory=dict)
    forward_us: int = 0
    sample_us: int = 0


class Executor(Protocol):
    def execute(self, rows: StepRows, sampling: np.ndarray) -> Executed:
        """Compute all ``rows`` and a token for ``rows.slots[sampling]``."""

    def decode(self, slots: bytes, num_steps: int, step_id: int, cut: RunCut) -> tuple[int, bytes]:
        """Steps of decodes alone, at most ``num_steps``: how many, k, and the tokens (int32[k, n]) of ``slots``, already in the batch.

        With k below ``num_steps`` the next one needs :meth:`execute`, or ``cut`` forbids it; ``step_id`` is the first one's.
        """

    def swap(self, swap_out: np.ndarray, swap_in: np.ndarray) -> None:
        """Move KV blocks: ``int32[n, 2]`` pairs of (source, target)."""

    def copy(self, pairs: np.ndarray) -> None:
        """Copy KV blocks within the device: ``int32[n, 2]`` of (source, target), none of them both."""


class NullExecutor:
    """Every row that samples yields the same token, at once or when the step has taken ``step_s`` seconds."""

    def __init__(self, step_s: float = 0.0):
        self._step_s = step_s

    def execute(self, rows: StepRows, sampling: np.ndarray) -> Executed:
        if self._step_s:
            time.sleep(self._step_s)  # an accelerator would compute meanwhile
        return Executed(np.full(sampling.size, NULL_TOKEN, dtype=np.int32))

    def decode(self, slots: bytes, num_steps: int, step_id: int, cut: RunCut) -> tuple[int, bytes]:
        return 0, b""

    def swap(self, swap_out: np.ndarray, swap_in: np.ndarray) -> None:
        """There are no blocks to move."""

    def copy(self, pairs: np.ndarray) -> None:
        """There are no blocks to copy."""


class ModelExecutor:
    """Forward pass over the paged cache, logits of the rows that need them, sampling."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        batch: PersistentBatch,
        table: SamplingTable,
        sampler: Sampler,
        forward: Callable[[StepRows], paddle.Tensor] | None = None,
    ):
        """``forward`` gives the hidden states ``[T, hidden]`` of a step's rows; None: by the model, operator after operator."""
        self._model = model
        self._cache = cache
        self._forward = forward or (lambda rows: model.forward(batch.inputs(rows), cache))
        self._table = table
        self._sampler = sampler
        self._pooler = Pooler(batch, table)
        self._prompt_logprobs = PromptLogprobs(batch, table, model.logits)

    def execute(self, rows: StepRows, sampling: np.ndarray) -> Executed:
        started = time.perf_counter_ns()
        with RecordEvent("forward"):
            hidden = self._forward(rows)
        prompt_logprobs = self._prompt_logprobs.collect(hidden, rows)
        embeddings = self._pooler.pool(hidden, rows)
        if sampling.size == 0:
            return Executed(np.empty(0, np.int32), prompt_logprobs=prompt_logprobs, forward_us=_us_since(started))
        last_tokens = np.cumsum(rows.lengths)[sampling] - 1
        if last_tokens.size != hidden.shape[0]:
            hidden = paddle.index_select(hidden, paddle.to_tensor(last_tokens))
        logits = self._model.logits(hidden)
        finite = np.isfinite(paddle.sum(hidden, axis=-1, dtype="float32").numpy())  # waits for the forward pass
        sampled = time.perf_counter_ns()
        slots = rows.slots[sampling]
        with RecordEvent("sample"):
            drawn = self._sampler.sample(logits, slots)
            logprobs = self._sampler.logprobs(logits, slots, drawn)
        # Weights of the head alone can be at fault: then no logit is a number, the drawn one neither.
        finite &= np.isfinite(paddle.take_along_axis(logits, paddle.to_tensor(drawn.token_ids[:, None]), axis=1).astype("float32").numpy()[:, 0])
        bad_rows = dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE)
        bad_rows |= drawn.errors
        return Executed(drawn.token_ids, logprobs, prompt_logprobs, embeddings, bad_rows, (sampled - started) // 1000, _us_since(sampled))

    def decode(self, slots: bytes, num_steps: int, step_id: int, cut: RunCut) -> tuple[int, bytes]:
        return 0, b""

    def swap(self, swap_out: np.ndarray, swap_in: np.ndarray) -> None:
        if swap_out.size:
            self._cache.swap_out(swap_out)
        if swap_in.size:
            self._cache.swap_in(swap_in)

    def copy(self, pairs: np.ndarray) -> None:
        self._cache.copy(pairs)


class ModelRunner:
    """Owns the persistent batch and turns a plan into a result."""

    def __init__(self, batch: PersistentBatch, table: SamplingTable, executor: Executor):
        self._batch = batch
        self._table = table
        self._executor = executor

    def steps(self, plan: StepPlan, cut: RunCut) -> Iterator[StepResult]:
        """Apply ``plan`` and compute it; its results as they come, each of one step of it or of several.

        A sequence that can't go on becomes a RowError; the others run. A run ends where ``cut`` forbids its next step.
        """
        errors = self._apply(plan)
        end = plan.step_id + plan.num_steps
        is_run = plan.num_steps > 1
        step_id = plan.step_id
        while step_id < end:
            if is_run and cut.forbids(step_id):
                yield StepResult(step_id=step_id, num_steps=0, num_cut=end - step_id)
                return
            if not errors and not plan.chunk_slots:
                result = self._plain_steps(step_id, end, plan.decodes, cut)
                if result is not None:
                    yield result
                    step_id += result.num_steps + result.num_cut
                    if step_id == end:
                        return
            yield self._step(step_id, plan, errors)
            errors = []
            step_id += 1

    def _plain_steps(self, step_id: int, end: int, decodes: bytes, cut: RunCut) -> StepResult | None:
        """Steps of a plan of decodes alone, from ``step_id`` on; None when that needs a look at every row."""
        started = time.perf_counter_ns()
        count, token_ids = self._executor.decode(decodes, end - step_id, step_id, cut)
        if not count:
            return None
        rest = end - step_id - count
        return StepResult(
            step_id=step_id,
            slots=decodes,
            token_ids=token_ids,
            forward_us=_us_since(started),
            num_steps=count,
            num_cut=rest if rest and cut.forbids(step_id + count) else 0,
        )

    def _step(self, step_id: int, plan: StepPlan, errors: list[RowError]) -> StepResult:
        """One step of ``plan`` with a look at every row. ``errors``: what is wrong already."""
        with RecordEvent("prepare"):
            rows, row_errors = self._batch.rows(plan)
        errors += row_errors
        if rows.slots.size == 0:
            return StepResult(step_id=step_id, errors=errors)
        sampling = np.flatnonzero(rows.starts + rows.lengths == self._batch.num_tokens[rows.slots])
        executed = self._executor.execute(rows, sampling)
        slots, token_ids = rows.slots[sampling], executed.token_ids
        if executed.bad_rows:
            bad = list(executed.bad_rows)
            self._batch.failed[slots[bad]] = True
            errors += [RowError(int(slots[row]), *problem) for row, problem in executed.bad_rows.items()]
            slots, token_ids = np.delete(slots, bad), np.delete(token_ids, bad)
        self._batch.append(slots, token_ids)
        return StepResult(
            step_id=step_id,
            slots=slots.tobytes(),
            token_ids=token_ids.tobytes(),
            logprobs=[entry for entry in executed.logprobs if not self._batch.failed[entry.slot]],
            prompt_logprobs=executed.prompt_logprobs,
            errors=errors,
            forward_us=executed.forward_us,
            sample_us=executed.sample_us,
            embeddings=executed.embeddings,
        )

    def _apply(self, plan: StepPlan) -> list[RowError]:
        """The plan's differences. Most plans of decodes have none."""
        if not (plan.released or plan.started or plan.grown_slots or plan.swap_out or plan.swap_in or plan.copies):
            return []
        with RecordEvent("apply"):
            errors = self._change_batch(plan)
            self._executor.swap(int32(plan.swap_out).reshape(-1, 2), int32(plan.swap_in).reshape(-1, 2))
            if plan.copies:
                self._executor.copy(int32(plan.copies).reshape(-1, 2))
        return errors

    def _change_batch(self, plan: StepPlan) -> list[RowError]:
        released = int32(plan.released)
        if released.size:
            self._table.release(released)
            self._batch.release(released)
        errors = []
        for sequence in plan.started:
            error = self._batch.start(sequence) or self._table.start(sequence)
            if error is not None:
                self._batch.failed[sequence.slot] = True
                errors.append(error)
        grown = int32(plan.grown_slots)
        if grown.size:
            self._batch.grow(grown, int32(plan.grown_blocks))
        return errors


def _us_since(started_ns: int) -> int:
    return (time.perf_counter_ns() - started_ns) // 1000
