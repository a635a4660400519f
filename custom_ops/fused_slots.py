"""A worker's persistent batch as the fused step's operator reads it: one call for steps of decodes alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from fastengine.custom_ops.fused import FusedCache

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _SlotArrays(ctypes.Structure):
    _fields_ = [
        *((name, _INTEGER) for name in ("max_num_seqs", "tokens_per_slot", "blocks_per_slot", "block_size", "num_cache_blocks", "kv_type")),
        *((name, _POINTER) for name in ("tokens", "num_tokens", "block_table", "num_blocks", "occupied", "failed")),
        *((name, _POINTER) for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "adjusted", "num_logprobs")),
        *((name, _POINTER) for name in ("key_caches", "value_caches", "key_scales", "value_scales", "logits")),
    ]


@dataclass(frozen=True)
class SlotArrays:
    """A row per slot, of S slots; the operator reads all of them at every step, and writes ``tokens`` and ``num_tokens``.

    int32 ``tokens [S, T]``, ``num_tokens [S]``, ``block_table [S, M]``, ``num_blocks [S]``; bool ``occupied``, ``failed`` ``[S]``.
    How a slot samples, ``[S]``: float32 ``temperature, top_p, min_p``, int32 ``top_k``, int64 ``seeds``, bool ``adjusted`` (by
    anything else) and int32 ``num_logprobs`` (negative: none). float32 ``logits [S, vocab]`` is for the operator to write.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    block_table: np.ndarray
    num_blocks: np.ndarray
    occupied: np.ndarray
    failed: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    adjusted: np.ndarray
    num_logprobs: np.ndarray
    logits: np.ndarray


class BoundSlots:
    """``arrays`` and a ``cache`` of ``num_blocks`` as one C structure, and where the tokens of up to ``max_steps`` steps go."""

    def __init__(self, arrays: SlotArrays, cache: FusedCache, num_blocks: int, max_steps: int):
        columns = (
            *(arrays.tokens, arrays.num_tokens, arrays.block_table, arrays.num_blocks, arrays.occupied, arrays.failed),
            *(arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p, arrays.seeds, arrays.adjusted, arrays.num_logprobs),
        )
        assert all(column.flags.c_contiguous for column in (*columns, arrays.logits)), "slot arrays are contiguous"
        pools = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        self._alive = (arrays, cache)  # as long as their addresses are in use
        self.max_steps = max_steps
        self.token_ids = np.empty((max_steps, len(arrays.num_tokens)), np.int32)
        self.raw = _SlotArrays(
            *arrays.tokens.shape, arrays.block_table.shape[1], cache.block_size, num_blocks, cache.kv_type,
            *(column.ctypes.data for column in columns),
            *(None if pool is None else ctypes.addressof(pool) for pool in pools),
            arrays.logits.ctypes.data,
        )  # fmt: skip
        self.address = ctypes.addressof(self.raw)
        self.token_address = self.token_ids.ctypes.data
        self.done = ctypes.c_int64()
        self.done_address = ctypes.addressof(self.done)
