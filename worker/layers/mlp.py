"""The gated feed-forward layer: ``down(silu(gate(x)) * up(x))`` (Shazeer, 2020, SwiGLU)."""

from __future__ import annotations

from collections.abc import Iterator

import paddle

from fastengine import custom_ops
from fastengine.worker.layers.linear import ColumnParallelLinear, Place, RowParallelLinear, split_output
from fastengine.worker.layers.weights import WeightPiece
from fastengine.worker.parallel import TensorParallel


class GatedMLP:
    """``[T, hidden] -> [T, hidden]``."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, place: Place, tp: TensorParallel):
        parts = [split_output(name, intermediate_size, tp) for name in ("gate_proj", "up_proj")]
        self.gate_up = ColumnParallelLinear(hidden_size, parts, bias, place)
        self.down = RowParallelLinear(intermediate_size, hidden_size, bias, place, tp)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(custom_ops.silu_mul(self.gate_up(x)))

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        yield from self.gate_up.pieces(prefix)
        yield from self.down.pieces(f"{prefix}.down_proj")
