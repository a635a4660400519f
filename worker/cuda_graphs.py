"""Decode steps as CUDA graphs: captured once per batch size of a few, replayed with one launch.

A graph repeats its launches with the same addresses. So each bucket (batch size) has its inputs in memory
of its own, one packed tensor that a single copy fills; a smaller batch is padded::

    rows      | sequences ........ | padding: token 0 at position 0, stored nowhere (slot -1), seeing block 0 |
              0                    n                                                                          bucket

    packed    | token_ids | positions | slot_mapping | query_starts | context_lens | block_tables |   int32,
              each part begins at a multiple of 16 bytes

Rows depend on themselves alone, so padding changes nothing. All buckets share one pool of memory, which the
largest, captured first, sizes. Addresses of weights and KV cache are in the graphs, too: whoever moves these
calls :meth:`DecodeGraphs.release` first and :meth:`DecodeGraphs.capture` afterwards.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import numpy as np
import paddle

from fastengine.worker.batch import StepArrays
from fastengine.worker.loader.mapped_file import Moved

logger = logging.getLogger(__name__)

# Unless a flag says otherwise: larger decode batches keep the GPU busy without graphs.
LARGEST_BY_DEFAULT = 512
ALIGNMENT = 4  # int32 elements
NOT_STORED = -1


class Graph(Protocol):
    """``paddle.device.cuda.graphs.CUDAGraph``, or a stand-in."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...


GraphFactory = Callable[[], Graph]
# (a step's arrays as tensors) -> hidden states [rows, hidden]
DecodeForward = Callable[[tuple[paddle.Tensor, ...]], paddle.Tensor]


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, ascending, up to ``largest`` itself: padding takes at most one row in eight from 64 rows on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 8), *range(128, 256, 16), *range(256, largest + 1, 32)]
    return sorted({size for size in sizes if size <= largest} | ({largest} if largest > 0 else set()))


def paddle_graphs(place: object) -> GraphFactory:
    """Graphs of the GPU ``place`` that share one pool of memory."""
    from paddle.base.core import CUDAGraph as CoreCUDAGraph
    from paddle.device.cuda.graphs import CUDAGraph

    pool = CoreCUDAGraph.gen_new_memory_pool_id()
    return lambda: CUDAGraph(place, pool_id=pool)


class Bucket:
    """The inputs of one batch size, at fixed addresses."""

    def __init__(self, size: int, table_width: int):
        self.size = size
        shapes = [(size,), (size,), (size,), (size + 1,), (size,), (size, table_width)]
        lengths = [math.prod(shape) for shape in shapes]
        starts = [0, *accumulate(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)]
        ranges = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        self._host = np.zeros(starts[-1], np.int32)
        self._parts = StepArrays(*(self._host[part].reshape(shape) for part, shape in zip(ranges, shapes, strict=True)))
        self._parts.query_starts[:] = np.arange(size + 1)
        self._pad(0)
        self._packed = paddle.to_tensor(self._host)
        # Views: what is copied into the packed tensor shows in them.
        self.tensors = tuple(self._packed[part].reshape(shape) for part, shape in zip(ranges, shapes, strict=True))
        self.hidden: paddle.Tensor | None = None
        self.graph: Graph | None = None

    def fill(self, arrays: StepArrays) -> None:
        """Put a batch of at most ``size`` decodes in place."""
        count, width = arrays.block_tables.shape
        parts = self._parts
        parts.token_ids[:count] = arrays.token_ids
        parts.positions[:count] = arrays.positions
        parts.slot_mapping[:count] = arrays.slot_mapping
        parts.context_lens[:count] = arrays.context_lens
        # What stands right of a batch's own width is past its contexts.
        parts.block_tables[:count, :width] = arrays.block_tables
        self._pad(count)
        self._packed.copy_(paddle.to_tensor(self._host, place=paddle.CPUPlace()), False)

    def _pad(self, count: int) -> None:
        parts = self._parts
        parts.token_ids[count:] = 0
        parts.positions[count:] = 0
        parts.slot_mapping[count:] = NOT_STORED
        parts.context_lens[count:] = 1
        parts.block_tables[count:, 0] = 0


class DecodeGraphs:
    """Captures and replays decode steps of up to ``max(sizes)`` sequences with tables of up to ``table_width`` blocks."""

    def __init__(self, forward: DecodeForward, sizes: list[int], table_width: int, new_graph: GraphFactory, synchronize: Callable[[], None]):
        self._forward = forward
        self._table_width = table_width
        self._new_graph = new_graph
        self._synchronize = synchronize
        self._sizes = np.array(sorted(sizes))
        self._buckets: dict[int, Bucket] = {}

    def capture(self, moved: Moved | None = None) -> None:
        """Capture every size that isn't yet, ``moved`` being told of each. Raises RuntimeError naming the size that could not be."""
        started = time.monotonic()
        missing = [size for size in self._sizes[::-1].tolist() if size not in self._buckets]
        for size in missing:
            try:
                self._buckets[size] = self._captured(size)
            except RuntimeError as error:
                raise RuntimeError(
                    f"a decode step of {size} sequences could not be captured as a CUDA graph (--max-capture-batch-size 0 runs without): {error}"
                ) from error
            if moved is not None:
                moved()
        if missing:
            logger.info("captured decode steps of %s sequences in %.1f s", ", ".join(map(str, self._sizes)), time.monotonic() - started)

    def covers(self, num_seqs: int) -> bool:
        return bool(self._buckets) and num_seqs <= self._sizes[-1]

    def run(self, arrays: StepArrays) -> paddle.Tensor:
        """Hidden states ``[S, hidden]`` of a batch of S decodes; the next call overwrites them."""
        count = arrays.token_ids.size
        bucket = self._buckets[int(self._sizes[np.searchsorted(self._sizes, count)])]
        bucket.fill(arrays)
        assert bucket.graph is not None
        assert bucket.hidden is not None
        bucket.graph.replay()
        return bucket.hidden[:count]

    def release(self) -> None:
        """Give up the graphs and their memory."""
        self._synchronize()
        for bucket in self._buckets.values():
            assert bucket.graph is not None
            bucket.graph.reset()
        self._buckets.clear()

    def _captured(self, size: int) -> Bucket:
        bucket = Bucket(size, self._table_width)
        # Once outside of the capture: libraries set themselves up at their first call.
        self._forward(bucket.tensors)
        self._synchronize()
        graph = self._new_graph()
        graph.capture_begin()
        bucket.hidden = self._forward(bucket.tensors)
        graph.capture_end()
        self._synchronize()
        bucket.graph = graph
        return bucket
