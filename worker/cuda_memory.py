"""How many bytes a GPU has left for the KV cache, measured by running the largest steps before it is taken.

::

    total * gpu_memory_utilization
      - outside       what Paddle's allocator doesn't hold: CUDA contexts, libraries, other processes
      - peak          what it held at most while the steps ran: weights, activations, workspaces
      - graphs        what captured decode steps keep
      = KV cache
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import paddle

from fastengine.worker.batch import StepArrays
from fastengine.worker.cuda_forward import ForwardPass
from fastengine.worker.kv_cache import KVCache, KVShape

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Kernel nodes and parameters of one captured graph, which lie with the driver and not with Paddle's allocator.
BYTES_PER_GRAPH = 8 << 20
# Logits as the model gives them, a copy with penalties, and one with temperature for log-probabilities.
LOGITS_COPIES = 3


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes. ``reserved``: held by Paddle's allocator now, ``peak_reserved``: at most since the measurement began."""

    total: int
    free: int
    reserved: int
    peak_reserved: int


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that the engine may ask for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


class DeviceMemory(Protocol):
    def start(self) -> None:
        """Give idle memory back and forget earlier peaks."""

    def figures(self) -> MemoryFigures:
        """Once all launched work is done."""


class PaddleDeviceMemory:
    """What Paddle and the driver say of the current GPU."""

    def start(self) -> None:
        paddle.device.synchronize()
        paddle.device.cuda.empty_cache()
        paddle.device.cuda.reset_max_memory_reserved()

    def figures(self) -> MemoryFigures:
        paddle.device.synchronize()
        free, total = paddle.cuda.mem_get_info()
        return MemoryFigures(total, free, paddle.device.cuda.memory_reserved(), paddle.device.cuda.max_memory_reserved())


def kv_budget(figures: MemoryFigures, utilization: float, graph_bytes: int) -> int:
    """Bytes for the KV cache; negative where not even the rest fits into the share of the device."""
    outside = max(0, figures.total - figures.free - figures.reserved)
    return int(figures.total * utilization) - outside - figures.peak_reserved - graph_bytes


def measure_kv_budget(
    forward: ForwardPass, shape: KVShape, limits: StepLimits, utilization: float, capture_sizes: list[int], memory: DeviceMemory, device: str
) -> int:
    """Runs the largest steps over a cache of one block, which they do not write, and returns the bytes left for the cache.

    The decode step is run alone first: a captured one keeps what it takes beyond the weights.
    """
    cache = KVCache(shape, 1, 0, device)
    memory.start()
    before = memory.figures()
    graph_bytes = 0
    if capture_sizes:
        forward.eager(decode_arrays(limits, max(capture_sizes)), cache)
        graph_bytes = memory.figures().peak_reserved - before.reserved + len(capture_sizes) * BYTES_PER_GRAPH
    run_largest_steps(forward, cache, limits)
    figures = memory.figures()
    cache.drop()
    budget = kv_budget(figures, utilization, graph_bytes)
    logger.info(
        "GPU memory %.1f GiB: %.1f outside of Paddle, weights %.1f, steps %.1f, graphs %.1f; at %.0f %% this leaves %.1f for the KV cache",
        figures.total / GIB,
        max(0, figures.total - figures.free - figures.reserved) / GIB,
        before.reserved / GIB,
        (figures.peak_reserved - before.reserved) / GIB,
        graph_bytes / GIB,
        utilization * 100,
        budget / GIB,
    )
    return budget


def run_largest_steps(forward: ForwardPass, cache: KVCache, limits: StepLimits) -> None:
    """The longest prefill, then decodes of as many sequences as there may be at full width, with their logits."""
    forward.eager(prefill_arrays(limits), cache)
    hidden = forward.eager(decode_arrays(limits, limits.max_num_seqs), cache)
    logits = forward.logits(hidden)
    # Held together: sampling with all options does.
    copies = [logits, *(logits.clone() for _ in range(LOGITS_COPIES - 1))]
    del copies, hidden


def prefill_arrays(limits: StepLimits) -> StepArrays:
    """As many tokens as a step may have, in sequences as long as they may be."""
    tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    lengths = lengths[: limits.max_num_seqs]
    return _arrays(np.array(lengths), -(-max(lengths) // limits.block_size))


def decode_arrays(limits: StepLimits, num_seqs: int) -> StepArrays:
    """One token of each sequence, with tables for the longest: workspaces follow from the tables' width."""
    return _arrays(np.ones(num_seqs, np.int64), limits.table_width)


def _arrays(lengths: np.ndarray, table_width: int) -> StepArrays:
    """First chunks of these lengths: nothing is stored, and all tables name block 0 throughout."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    zeros = np.zeros(int(starts[-1]), np.int32)
    tables = np.zeros((lengths.size, table_width), np.int32)
    return StepArrays(zeros, positions.astype(np.int32), zeros - 1, starts.astype(np.int32), lengths.astype(np.int32), tables)
