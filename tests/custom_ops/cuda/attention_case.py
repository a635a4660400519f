"""Ragged attention batches over a paged cache, and what attention over them is in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.memory import Buffer, Kernels, decode, encode, filled, poisoned, poisoned_from

# Query weights in 16 bits and results rounded to 16 bits, of values around 1.
TOLERANCE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    value_size: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    cache: str = "bfloat16"
    window: int = 0
    sinks: bool = False
    wide: bool = False  # prefill by wgmma


@dataclass
class Case:
    """A batch: ``lengths[s]`` query rows at the end of ``contexts[s]`` tokens, in the cache's blocks from ``first_block`` on."""

    rng: np.random.Generator
    shape: Shape
    lengths: list[int]
    contexts: list[int]
    spread: float = 1.0
    first_block: int = 0
    keys: list[np.ndarray] = field(init=False)
    values: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        s, rng = self.shape, self.rng
        self.tokens = sum(self.lengths)
        self.max_blocks = max(-(-c // s.block_size) for c in self.contexts) + 1
        used = sum(-(-c // s.block_size) for c in self.contexts)
        free = list(self.first_block + rng.permutation(used + 2))
        # Entries past a sequence's blocks, and those before its window, must not be followed.
        tables = np.full((len(self.contexts), self.max_blocks), 10**8)
        rows = (self.first_block + used + 2, s.kv_heads, s.block_size)
        self.query = filled(rng.normal(size=(self.tokens, s.heads, s.size)) * self.spread, s.dtype)
        self.caches = [poisoned_from(self.first_block, (*rows, size), s.cache) for size in (s.size, s.value_size)]
        self.scales = [poisoned_from(self.first_block, rows, "float32") for _ in range(2)] if s.cache in ("int8", "fp8") else None
        self.keys, self.values = [], []
        for index, (length, context) in enumerate(zip(self.lengths, self.contexts, strict=True)):
            first = max(0, context - length + 1 - s.window) // s.block_size if s.window else 0
            for block in range(first, -(-context // s.block_size)):
                tables[index, block] = free.pop()
            seen = np.arange(first * s.block_size, context)
            kept = []
            for which, size in enumerate((s.size, s.value_size)):
                heads = rng.normal(size=(len(seen), s.kv_heads, size))
                kept.append(np.zeros((context, s.kv_heads, size)))
                kept[which][seen] = self._store(which, tables[index, seen // s.block_size], seen % s.block_size, heads)
            self.keys.append(kept[0])
            self.values.append(kept[1])
        self.tables = filled(tables, "int32")
        self.starts = filled(np.cumsum([0, *self.lengths]), "int32")
        self.context_lens = filled(np.array(self.contexts), "int32")
        self.sinks = filled(rng.normal(size=s.heads) * 2) if s.sinks else None

    def _store(self, which: int, blocks: np.ndarray, offsets: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Writes heads [n, Hkv, D] into the cache and returns them as the cache holds them."""
        cache = self.caches[which]
        if self.scales is None:
            cache.stored[blocks, :, offsets] = encode(heads, self.shape.cache)
            return decode(cache.stored[blocks, :, offsets], self.shape.cache)
        limit = 127.0 if self.shape.cache == "int8" else 448.0
        scale = (np.abs(heads).max(axis=-1) / limit).astype(np.float32)
        self.scales[which].stored[blocks, :, offsets] = scale
        cache.stored[blocks, :, offsets] = encode(heads / scale[..., None], self.shape.cache)
        return decode(cache.stored[blocks, :, offsets], self.shape.cache) * scale[..., None].astype(np.float64)

    def workspace(self, kernels: Kernels) -> tuple[Buffer, Buffer]:
        s, sizes = self.shape, (ctypes.c_int64 * 2)()
        kernels.call(
            "attention_workspace",
            num_seqs=len(self.lengths),
            num_tokens=self.tokens,
            max_blocks=self.max_blocks,
            block_size=s.block_size,
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            value_size=s.value_size,
            plan_ints=ctypes.addressof(sizes),
            partial_floats=ctypes.addressof(sizes) + 8,
        )
        return poisoned((sizes[0],), "int32"), poisoned((sizes[1],))

    def run(self, kernels: Kernels, max_query_tokens: int = 0) -> np.ndarray:
        s = self.shape
        plan, partials = self.workspace(kernels)
        out = poisoned((self.tokens, s.heads, s.value_size), s.dtype)
        batch = {"query_starts": self.starts, "context_lens": self.context_lens, "plan": plan, "num_seqs": len(self.lengths)}
        batch |= {"num_tokens": self.tokens, "sliding_window": s.window, "num_heads": s.heads, "num_kv_heads": s.kv_heads}
        kernels.call("attention_plan", **batch)
        kernels.call(
            "paged_attention",
            **batch,
            query=self.query,
            key_cache=self.caches[0],
            value_cache=self.caches[1],
            key_scale=self.scales[0] if self.scales else None,
            value_scale=self.scales[1] if self.scales else None,
            block_tables=self.tables,
            sinks=self.sinks,
            partials=partials,
            out=out,
            query_stride=s.heads * s.size,
            max_blocks=self.max_blocks,
            head_size=s.size,
            value_size=s.value_size,
            block_size=s.block_size,
            max_query_tokens=max_query_tokens,
            wide_prefill=int(s.wide),
            dtype=getattr(DType, s.dtype),
            cache_dtype=getattr(DType, s.cache),
            scale=s.size**-0.5,
        )
        return out.values

    def expected(self) -> np.ndarray:
        s = self.shape
        out = np.zeros((self.tokens, s.heads, s.value_size))
        group = s.heads // s.kv_heads
        row = 0
        for length, context, keys, values in zip(self.lengths, self.contexts, self.keys, self.values, strict=True):
            for position in range(context - length, context):
                first = max(0, position - s.window + 1) if s.window else 0
                for head in range(s.heads):
                    seen = slice(first, position + 1)
                    scores = keys[seen, head // group] @ self.query.values[row, head] * s.size**-0.5
                    sink = float(self.sinks.values[head]) if self.sinks else -np.inf
                    top = max(scores.max(), sink)
                    weights = np.exp(scores - top)
                    out[row, head] = weights @ values[seen, head // group] / (weights.sum() + np.exp(sink - top))
                row += 1
        return out

    def assert_right(self, kernels: Kernels, max_query_tokens: int = 0) -> None:
        # Prefill rounds the weights as well as the result.
        tolerance = TOLERANCE[self.shape.dtype] * (1 if max(self.lengths) == 1 else 2)
        np.testing.assert_allclose(self.run(kernels, max_query_tokens), self.expected(), rtol=tolerance, atol=tolerance)
