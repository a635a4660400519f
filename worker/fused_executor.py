"""The executor for dense models on a CPU: a step's forward pass is one call of the fused operator."""

from __future__ import annotations

import time

import numpy as np
import paddle
from paddle.profiler import RecordEvent

from fastengine.custom_ops.fused import FusedCache, FusedModel, KvType
from fastengine.custom_ops.fused_sampling import RowSampling
from fastengine.custom_ops.fused_slots import BoundSlots, SlotArrays
from fastengine.protocol.steps import MAX_RUN_STEPS
from fastengine.worker.batch import PersistentBatch, StepArrays, StepRows
from fastengine.worker.fused_sampler import FusedSampler, PreparedSampling
from fastengine.worker.kv_cache import KVCache
from fastengine.worker.model_runner import Executed
from fastengine.worker.pooling import Pooler
from fastengine.worker.prompt_logprobs import ROWS_AT_ONCE, PromptLogprobs
from fastengine.worker.row_problems import NOT_FINITE, RowProblem
from fastengine.worker.run_cut import RunCut
from fastengine.worker.sampling_table import SamplingTable

KV_TYPES = {"float32": KvType.FLOAT32, "bfloat16": KvType.BFLOAT16, "int8": KvType.INT8}


class FusedExecutor:
    """Forward pass over the paged cache and sampling, in one call; logits are kept only where a row is not greedy."""

    def __init__(self, model: FusedModel, cache: KVCache, batch: PersistentBatch, table: SamplingTable, sampler: FusedSampler):
        self._model = model
        self._cache = cache
        self._batch = batch
        self._table = table
        self._sampler = sampler
        self._pooler = Pooler(batch, table)
        self._prompt_logprobs = PromptLogprobs(batch, table, self._logits_of)
        self._buffer: np.ndarray | None = None
        self._fused_cache: FusedCache | None = None
        self._bound_to: paddle.Tensor | None = None
        self._slots: BoundSlots | None = None

    def execute(self, rows: StepRows, sampling: np.ndarray) -> Executed:
        started = time.perf_counter_ns()
        arrays = self._checked(self._batch.arrays(rows))
        slots = rows.slots[sampling]
        last_tokens = (arrays.query_starts[1:][sampling] - 1).astype(np.int32)
        if self._needs_all_hidden_states(rows):
            return self._execute_with_hidden_states(rows, sampling, arrays, started)
        hidden = np.empty((sampling.size, self._model.shape.hidden), np.float32)
        if self._is_greedy(slots):
            token_ids = np.empty(sampling.size, np.int32)
            self._step(arrays, last_tokens, token_out=token_ids, hidden_out=hidden)
            return Executed(token_ids, bad_rows=_not_finite(hidden, token_ids < 0), forward_us=_us_since(started))
        prepared, logits, token_ids = self._sampler.prepare(slots), self._logits_buffer(sampling.size), np.empty(sampling.size, np.int32)
        self._step(arrays, last_tokens, logits=logits, token_out=token_ids, hidden_out=hidden, sampling=prepared.rows)
        return self._sampled(Executed(token_ids, forward_us=_us_since(started)), prepared, hidden, logits)

    def decode(self, slots: bytes, num_steps: int, step_id: int, cut: RunCut) -> tuple[int, bytes]:
        with RecordEvent("fused step"):
            return self._model.decode(slots, num_steps, self._bound_slots(), step_id, cut.address)

    def swap(self, swap_out: np.ndarray, swap_in: np.ndarray) -> None:
        if swap_out.size:
            self._cache.swap_out(swap_out)
        if swap_in.size:
            self._cache.swap_in(swap_in)

    def copy(self, pairs: np.ndarray) -> None:
        self._cache.copy(pairs)

    def _execute_with_hidden_states(self, rows: StepRows, sampling: np.ndarray, arrays: StepArrays, started: int) -> Executed:
        """The same for steps of which every token's hidden state is wanted; logits are computed from those."""
        num_tokens = arrays.token_ids.size
        states = np.empty((num_tokens, self._model.shape.hidden), np.float32)
        self._step(arrays, np.arange(num_tokens, dtype=np.int32), hidden_out=states)
        tensor = paddle.from_dlpack(states)
        executed = Executed(
            np.empty(0, np.int32),
            prompt_logprobs=self._prompt_logprobs.collect(tensor, rows),
            embeddings=self._pooler.pool(tensor, rows),
        )
        if sampling.size == 0:
            executed.forward_us = _us_since(started)
            return executed
        hidden = states[arrays.query_starts[1:][sampling] - 1]
        logits = self._logits_buffer(sampling.size)
        self._model.logits(hidden, logits)
        executed.forward_us = _us_since(started)
        prepared = self._sampler.prepare(rows.slots[sampling])
        executed.token_ids = np.empty(sampling.size, np.int32)
        self._model.sample(logits, prepared.rows, executed.token_ids)
        return self._sampled(executed, prepared, hidden, logits)

    def _sampled(self, executed: Executed, prepared: PreparedSampling, hidden: np.ndarray, logits: np.ndarray) -> Executed:
        """``executed``, whose tokens are drawn, with all else that sampling yields."""
        started = time.perf_counter_ns()
        with RecordEvent("sample"):
            executed.logprobs = self._sampler.finish(prepared, executed.token_ids)
        drawn = logits[np.arange(len(logits)), executed.token_ids]
        executed.bad_rows = _not_finite(hidden, ~np.isfinite(drawn)) | prepared.errors
        executed.sample_us = _us_since(started)
        return executed

    def _needs_all_hidden_states(self, rows: StepRows) -> bool:
        if rows.num_decodes == rows.slots.size:
            return False
        chunks = rows.slots[rows.num_decodes :]
        return bool(self._table.pooling[chunks].any() or (self._table.num_prompt_logprobs[chunks] >= 0).any())

    def _is_greedy(self, slots: np.ndarray) -> bool:
        table = self._table
        return not (table.temperature[slots].any() or table.adjusted[slots].any() or (table.num_logprobs[slots] >= 0).any())

    def _step(
        self,
        arrays: StepArrays,
        sample_rows: np.ndarray,
        *,
        logits: np.ndarray | None = None,
        token_out: np.ndarray | None = None,
        hidden_out: np.ndarray | None = None,
        sampling: RowSampling | None = None,
    ) -> None:
        with RecordEvent("fused step"):
            self._model.step(*arrays, sample_rows, self._paged(), logits=logits, token_out=token_out, hidden_out=hidden_out, sampling=sampling)

    def _paged(self) -> FusedCache:
        """The cache's addresses, which change when it has been asleep."""
        layers = self._cache.layers
        if self._fused_cache is None or self._bound_to is not layers[0].key.tensor:
            parts = [[storage.address for storage in part] for part in zip(*(layer.storages() for layer in layers), strict=True)]
            self._fused_cache = FusedCache.of(KV_TYPES[self._cache.shape.dtype], self._batch.block_size, *parts)
            self._bound_to = layers[0].key.tensor
            self._slots = None
        return self._fused_cache

    def _bound_slots(self) -> BoundSlots:
        cache = self._paged()
        if self._slots is None:
            b, t = self._batch, self._table
            sampling = (t.temperature, t.top_k, t.top_p, t.min_p, t.seed, t.adjusted, t.num_logprobs)
            columns = (b.tokens, b.num_tokens, b.block_table, b.num_blocks, b.occupied, b.failed, *sampling)
            arrays = SlotArrays(*columns, self._logits_buffer(b.max_num_seqs))
            self._slots = BoundSlots(arrays, cache, self._cache.num_blocks, MAX_RUN_STEPS)
        return self._slots

    def _checked(self, arrays: StepArrays) -> StepArrays:
        """The operator checks no index. Raises ValueError for what would reach foreign memory."""
        tables, limit = arrays.block_tables, self._cache.num_blocks
        if int(tables.min()) < 0 or int(tables.max()) >= limit:
            raise ValueError(f"a block table names blocks outside of [0, {limit})")
        if int(arrays.token_ids.min()) < 0 or int(arrays.token_ids.max()) >= self._model.shape.vocab:
            raise ValueError(f"a sequence holds tokens outside of [0, {self._model.shape.vocab})")
        # A step that runs ahead of the engine's length check may be one past the end; its token is not used.
        last = self._model.shape.cos_sin.shape[0] - 1
        if int(arrays.positions.max()) > last:
            return arrays._replace(positions=np.minimum(arrays.positions, last, dtype=np.int32))
        return arrays

    def _logits_buffer(self, num_rows: int) -> np.ndarray:
        """float32 ``[num_rows, vocab]``; the same memory at every step, whose pages are there already."""
        if self._buffer is None:
            most = max(self._batch.max_num_seqs, ROWS_AT_ONCE)
            self._buffer = np.empty((most, self._model.shape.vocab), np.float32)
        return self._buffer[:num_rows]

    def _logits_of(self, hidden: paddle.Tensor) -> paddle.Tensor:
        states = np.ascontiguousarray(hidden.numpy())
        logits = self._logits_buffer(len(states))
        self._model.logits(states, logits)
        return paddle.from_dlpack(logits)


def _not_finite(hidden: np.ndarray, no_token: np.ndarray) -> dict[int, RowProblem]:
    """Rows whose hidden state is not finite, or whose logits, in spite of that, gave no token (bool ``[R]``)."""
    bad = ~np.isfinite(hidden.sum(axis=-1)) | no_token
    return dict.fromkeys(np.flatnonzero(bad).tolist(), NOT_FINITE) if bad.any() else {}


def _us_since(started_ns: int) -> int:
    return (time.perf_counter_ns() - started_ns) // 1000
