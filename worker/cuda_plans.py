"""What all layers of a step share on a GPU: the batch cut into pieces of work for paged attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import paddle

if TYPE_CHECKING:
    from fastengine.worker.step_inputs import StepInputs

# custom_ops.cuda.ops.attention_plan, or a stand-in.
PlanMaker = Callable[..., paddle.Tensor]


@dataclass
class AttentionPlans:
    """Made anew for every step: a plan follows from the step's lengths. ``max_query_tokens``: those of its longest row."""

    make: PlanMaker
    max_query_tokens: int
    _by_sizes: dict[tuple[int, ...], paddle.Tensor] = field(default_factory=dict)

    def options(self, inputs: StepInputs, num_heads: int, num_kv_heads: int, block_size: int, sliding_window: int) -> dict[str, Any]:
        """What ``paged_attention`` takes beside the batch; layers of equal sizes get the same plan."""
        sizes = (int(inputs.token_ids.shape[0]), num_heads, num_kv_heads, block_size, sliding_window)
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = self.make(inputs.block_tables, inputs.query_starts, inputs.context_lens, *sizes)
        return {"plan": self._by_sizes[sizes], "max_query_tokens": self.max_query_tokens}
