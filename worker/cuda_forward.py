"""The forward pass on a GPU: kernels launched one by one, or a captured decode step replayed."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import paddle

from fastengine.worker.batch import PersistentBatch, StepArrays, StepRows
from fastengine.worker.cuda_graphs import DecodeGraphs
from fastengine.worker.cuda_plans import AttentionPlans, PlanMaker
from fastengine.worker.kv_cache import KVCache
from fastengine.worker.step_inputs import StepInputs


class Model(Protocol):
    def forward(self, inputs: StepInputs, cache: KVCache) -> paddle.Tensor: ...

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor: ...


class ForwardPass:
    """Turns a step's arrays into hidden states ``[T, hidden]``. ``make_plan`` None: the operators know no plans (a CPU's)."""

    def __init__(self, model: Model, make_plan: PlanMaker | None):
        self._model = model
        self._make_plan = make_plan

    def eager(self, arrays: StepArrays, cache: KVCache) -> paddle.Tensor:
        longest = int(np.diff(arrays.query_starts).max())
        return self.of_tensors(tuple(paddle.to_tensor(array) for array in arrays), longest, cache)

    def of_tensors(self, tensors: tuple[paddle.Tensor, ...], max_query_tokens: int, cache: KVCache) -> paddle.Tensor:
        """``tensors``: a step's arrays, in their order."""
        plans = None if self._make_plan is None else AttentionPlans(self._make_plan, max_query_tokens)
        return self._model.forward(StepInputs(*tensors, plans), cache)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self._model.logits(hidden)


class CudaSteps:
    """Hidden states of a step's rows: what :class:`ModelExecutor` computes with on a GPU.

    ``max_position``: rows of the model's rotary table. The operators look at no index, so it is done here.
    """

    def __init__(self, forward: ForwardPass, cache: KVCache, batch: PersistentBatch, max_position: int, graphs: DecodeGraphs | None):
        self._forward = forward
        self._cache = cache
        self._batch = batch
        self._max_position = max_position
        self._graphs = graphs

    def __call__(self, rows: StepRows) -> paddle.Tensor:
        """``[T, hidden]``; of a replayed step valid until the next. Raises ValueError for blocks that there aren't."""
        arrays = self._checked(self._batch.arrays(rows))
        if self._graphs is not None and rows.num_decodes == rows.slots.size and self._graphs.covers(rows.slots.size):
            return self._graphs.run(arrays)
        return self._forward.eager(arrays, self._cache)

    def _checked(self, arrays: StepArrays) -> StepArrays:
        tables, limit = arrays.block_tables, self._cache.num_blocks
        if int(tables.min()) < 0 or int(tables.max()) >= limit:
            raise ValueError(f"a block table names blocks outside of [0, {limit})")
        # A step that runs ahead of the engine's length check may be one past the end; its token is not used.
        return arrays._replace(positions=np.minimum(arrays.positions, self._max_position - 1, dtype=np.int32))
