"""What one forward pass reads: flat, ragged tensors over all rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from fastengine.worker.cuda_plans import AttentionPlans


@dataclass(frozen=True)
class StepInputs:
    """T tokens of S rows, row after row.

    ::

        token_ids     | row 0 ........ | row 1 | row 2 ... |     T
        query_starts  0                ^       ^           ^     S + 1

    ``slot_mapping`` is ``block * block_size + offset``, where each token's K and V go.
    ``context_lens`` counts a row's tokens up to and with this step's.
    """

    token_ids: paddle.Tensor  # int32[T]
    positions: paddle.Tensor  # int32[T]
    slot_mapping: paddle.Tensor  # int32[T]
    query_starts: paddle.Tensor  # int32[S + 1]
    context_lens: paddle.Tensor  # int32[S]
    block_tables: paddle.Tensor  # int32[S, M]
    plans: AttentionPlans | None = None  # on a GPU
