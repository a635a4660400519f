"""Linear layers that split over ranks.

Weights are stored ``[in, out]``, Paddle's order (measurably faster than the checkpoint's ``[out, in]``
for 2 to 64 rows with MKL)::

    column parallel   each rank holds some outputs     x whole   -> y split      no communication
    row parallel      each rank holds some inputs      x split   -> y summed     one all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import paddle

from fastengine.worker.layers.weights import ALL, WeightPiece
from fastengine.worker.memory import Storage
from fastengine.worker.parallel import TensorParallel


@dataclass(frozen=True)
class Place:
    """Element type and device of parameters."""

    dtype: str
    device: str

    def storage(self, *shape: int) -> Storage:
        return Storage(shape, self.dtype, self.device)


@dataclass(frozen=True)
class OutputPart:
    """Rows ``rows`` of the checkpoint tensor ``name`` (``[total, in]``) as one part of a merged output."""

    name: str
    total: int
    rows: slice
    counted: bool = True

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start


def split_output(name: str, total: int, tp: TensorParallel) -> OutputPart:
    """This rank's equal share of ``total`` outputs."""
    share = tp.share(total, f"{name} outputs")
    return OutputPart(name, total, slice(tp.rank * share, (tp.rank + 1) * share))


class ColumnParallelLinear:
    """``x @ W`` with several projections of one input merged into one matrix: ``[T, in] -> [T, sum of parts]``."""

    def __init__(self, in_features: int, parts: list[OutputPart], bias: bool, place: Place):
        self.in_features = in_features
        self.parts = parts
        width = sum(part.size for part in parts)
        self.weight = place.storage(in_features, width)
        self.bias = place.storage(width) if bias else None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.matmul(x, self.weight.tensor)
        return y if self.bias is None else y + self.bias.tensor

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        start = 0
        for part in self.parts:
            columns = slice(start, start + part.size)
            name = f"{prefix}.{part.name}.weight"
            shape = (part.total, self.in_features)
            yield WeightPiece(name, shape, self.weight, (ALL, columns), rows=part.rows, transpose=True, counted=part.counted)
            if self.bias is not None:
                yield WeightPiece(f"{prefix}.{part.name}.bias", (part.total,), self.bias, (columns,), rows=part.rows, counted=part.counted)
            start = columns.stop


class RowParallelLinear:
    """``sum over ranks of x_rank @ W_rank``: ``[T, in / ranks] -> [T, out]``."""

    def __init__(self, in_features: int, out_features: int, bias: bool, place: Place, tp: TensorParallel):
        share = tp.share(in_features, "row-parallel inputs")
        self.shape = (out_features, in_features)
        self.columns = slice(tp.rank * share, (tp.rank + 1) * share)
        self.tp = tp
        self.weight = place.storage(share, out_features)
        self.bias = place.storage(out_features) if bias else None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.tp.all_reduce(paddle.matmul(x, self.weight.tensor))
        return y if self.bias is None else y + self.bias.tensor

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        yield WeightPiece(f"{prefix}.weight", self.shape, self.weight, (ALL, ALL), columns=self.columns, transpose=True)
        if self.bias is not None:
            yield WeightPiece(f"{prefix}.bias", self.shape[:1], self.bias, (ALL,), counted=self.tp.rank == 0)
