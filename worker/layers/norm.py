"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

import paddle

from fastengine import custom_ops
from fastengine.worker.layers.linear import Place
from fastengine.worker.layers.weights import ALL, WeightPiece
from fastengine.worker.parallel import TensorParallel


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, place: Place, tp: TensorParallel):
        self.eps = eps
        self.weight = place.storage(size)
        self.counted = tp.rank == 0

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return custom_ops.rms_norm(x, self.weight.tensor, self.eps)

    def add(self, x: paddle.Tensor, residual: paddle.Tensor) -> paddle.Tensor:
        """``residual += x`` in place, then the norm of the sum."""
        return custom_ops.add_rms_norm(x, residual, self.weight.tensor, self.eps)

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        yield WeightPiece(f"{prefix}.weight", self.weight.shape, self.weight, (ALL,), counted=self.counted)
