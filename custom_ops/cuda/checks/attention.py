"""Paged attention (decode, prefill, mixed) and attention over a latent cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from .memory import Array
from .workload import ROUNDING, Bench, Workload, code, require_close, require_equal


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    size: int
    value_size: int
    dtype: str = "bfloat16"
    cache: str = "bfloat16"
    window: int = 0
    sinks: bool = False
    wide: bool = False  # prefill by wgmma, where there is such


class Batch:
    """``lengths[s]`` query rows at the end of ``contexts[s]`` tokens, in blocks in a random order."""

    def __init__(self, bench: Bench, heads: Heads, lengths: list[int], contexts: list[int], block_size: int):
        self.bench, self.heads, self.lengths, self.contexts, self.block_size = bench, heads, lengths, contexts, block_size
        memory = bench.memory
        blocks = [-(-context // block_size) for context in contexts]
        self.max_blocks, self.num_blocks, self.tokens = max(blocks), sum(blocks), sum(lengths)
        # Entries past a sequence's blocks must not be followed.
        self.tables = np.full((len(contexts), self.max_blocks), 10**9)
        order = bench.rng.permutation(self.num_blocks)
        for row, count, end in zip(self.tables, blocks, np.cumsum(blocks), strict=True):
            row[:count] = order[end - count : end]
        self.starts = np.cumsum([0, *lengths])
        self.query = memory.random((self.tokens, heads.query, heads.size), heads.dtype)
        self.out = memory.poisoned((self.tokens, heads.query, heads.value_size), heads.dtype)
        sizes = (ctypes.c_int64 * 2)()
        self.shape = {"num_seqs": len(lengths), "num_tokens": self.tokens, "num_heads": heads.query, "num_kv_heads": heads.kv}
        self.pages = {"max_blocks": self.max_blocks, "block_size": block_size, "value_size": heads.value_size}
        places = {"plan_ints": ctypes.addressof(sizes), "partial_floats": ctypes.addressof(sizes) + 8}
        bench.call("attention_workspace", **self.shape, **self.pages, **places)
        self.device = {
            "query_starts": memory.filled(self.starts, "int32"),
            "context_lens": memory.filled(np.array(contexts), "int32"),
            "plan": memory.poisoned((sizes[0],), "int32"),
            "sliding_window": heads.window,
        }
        self.partials = memory.poisoned((sizes[1],))
        self.block_tables = memory.filled(self.tables, "int32")
        bench.call("attention_plan", **self.shape, **self.device)

    def run(self, operator: str, **fields: Array | int | float | None) -> None:
        h = self.heads
        types = {"dtype": code(h.dtype), "cache_dtype": code(h.cache), "scale": h.size**-0.5, "head_size": h.size, "query_stride": h.query * h.size}
        tensors = {"query": self.query, "block_tables": self.block_tables, "partials": self.partials, "out": self.out}
        longest = {"max_query_tokens": max(self.lengths), "wide_prefill": int(h.wide)}
        self.bench.call(operator, **self.shape, **self.pages, **self.device, **types, **tensors, **longest, **fields)

    def rows_of(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets of a sequence's tokens."""
        seen = np.arange(self.contexts[seq])
        return self.tables[seq, seen // self.block_size], seen % self.block_size

    def expected(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
        """query [n, Hq, D] at the end of keys [context, Hkv, D] and values: float64 [n, Hq, Dv]."""
        h, group = self.heads, self.heads.query // self.heads.kv
        position = np.arange(len(keys) - len(query), len(keys))[:, None]
        token = np.arange(len(keys))[None]
        visible = (token <= position) & ((token > position - h.window) | (h.window == 0))
        out = np.empty((len(query), h.query, h.value_size))
        for head in range(h.query):
            scores = np.where(visible, query[:, head] @ keys[:, head // group].T * h.size**-0.5, -np.inf)
            sink = -np.inf if sinks is None else float(sinks[head])
            top = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp(scores - top)
            out[:, head] = weights @ values[:, head // group] / (weights.sum(axis=1, keepdims=True) + np.exp(sink - top))
        return out


def paged_attention(bench: Bench, heads: Heads, lengths: list[int], contexts: list[int], block_size: int = 16) -> Workload:
    batch, memory = Batch(bench, heads, lengths, contexts, block_size), bench.memory
    rows = (batch.num_blocks, heads.kv, block_size)
    caches = [memory.random((*rows, size), heads.cache) for size in (heads.size, heads.value_size)]
    scales = [
        memory.filled(bench.rng.uniform(0.5, 1.5, rows) / (60.0 if heads.cache == "int8" else 1.0)) if heads.cache != heads.dtype else None
        for _ in range(2)
    ]
    sinks = memory.random((heads.query,), "float32") if heads.sinks else None
    tensors = {"key_cache": caches[0], "value_cache": caches[1], "key_scale": scales[0], "value_scale": scales[1], "sinks": sinks}

    def launch() -> None:
        batch.run("paged_attention", **tensors)

    def check() -> None:
        query, out = batch.query.values, batch.out.values
        stored = [c.values if s is None else c.values * s.values[..., None] for c, s in zip(caches, scales, strict=True)]
        for seq in range(len(lengths)):
            mine, (blocks, offsets) = slice(batch.starts[seq], batch.starts[seq + 1]), batch.rows_of(seq)
            keys, values = (array[blocks, :, offsets] for array in stored)
            expected = batch.expected(query[mine], keys, values, sinks.values if sinks else None)
            # Prefill rounds the weights as well as the result.
            tolerance = ROUNDING[heads.dtype] * (1 if lengths[seq] == 1 else 2)
            require_close(f"out of sequence {seq}", out[mine], expected, tolerance, tolerance)

    seen = sum(min(c, n - 1 + heads.window) if heads.window else c for n, c in zip(lengths, contexts, strict=True))
    pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(lengths, contexts, strict=True))
    item = caches[0].num_bytes // int(np.prod(caches[0].shape))
    num_bytes = batch.query.num_bytes + batch.out.num_bytes + seen * heads.kv * (heads.size + heads.value_size) * item
    operations = 2 * pairs * heads.query * (heads.size + heads.value_size)
    # The targets hold from the sizes on that the kernels' sources name.
    if max(lengths) == 1:
        promised = len(lengths) >= 16 and min(contexts) >= 4096 and heads.query // heads.kv <= (8 if item == 2 else 4)
        return Workload(launch, check, num_bytes, operations, "copy", 0.85 if promised else 0.0)
    promised = min(contexts) >= 8192 and min(lengths) >= 2048 and heads.size == heads.value_size == 128
    return Workload(launch, check, num_bytes, operations, "matrix", 0.60 if promised else 0.0)


def attention_plan(bench: Bench, seqs: int, heads: int, window: int) -> Workload:
    """Many sequences, every third with several query rows, some with none."""
    memory, rng = bench.memory, bench.rng
    lengths = np.where(np.arange(seqs) % 3 == 0, rng.integers(0, 300, seqs), 1)
    contexts = lengths + rng.integers(0, 12000, seqs)
    visible = np.minimum(contexts, window) if window else contexts
    shortest = (visible + 31) // 32
    per_piece = np.maximum(256, (shortest + 63) // 64 * 64)
    # As attention.h says: pieces of decodes, tiles of prefills, and whose they are.
    pieces = np.where(lengths == 1, -(-visible // per_piece), 0)
    tiles = np.where(lengths > 1, -(-lengths // max(1, 128 // heads)), 0)
    max_tiles = -(-int(lengths.sum()) // max(1, 128 // heads)) + seqs
    plan = memory.poisoned((4 + 2 * (seqs + 1) + max_tiles + int(pieces.sum()),), "int32")
    arrays = {"query_starts": memory.filled(np.cumsum([0, *lengths]), "int32"), "context_lens": memory.filled(contexts, "int32"), "plan": plan}
    sizes = {"num_seqs": seqs, "num_tokens": int(lengths.sum()), "sliding_window": window, "num_heads": heads, "num_kv_heads": 1}

    def launch() -> None:
        bench.call("attention_plan", **arrays, **sizes)

    def check() -> None:
        starts = [np.cumsum([0, *counts]) for counts in (pieces, tiles)]
        owners = [np.repeat(np.arange(seqs), counts) for counts in (pieces, tiles)]
        unused = np.full(max_tiles - len(owners[1]), -1)
        require_equal("plan", plan.stored, np.concatenate([[len(o) for o in owners], [0, 0], *starts, owners[1], unused, owners[0]]))

    return Workload(launch, check, plan.num_bytes)


def mla_decode(bench: Bench, heads: int, contexts: list[int], dtype: str, block_size: int = 64) -> Workload:
    shape = Heads(heads, 1, 576, 512, dtype, dtype)
    batch = Batch(bench, shape, [1] * len(contexts), contexts, block_size)
    cache = bench.memory.random((batch.num_blocks, block_size, shape.size), dtype)

    def launch() -> None:
        batch.run("mla_decode", key_cache=cache, value_cache=None, key_scale=None, value_scale=None, sinks=None)

    def check() -> None:
        query, out, stored = batch.query.values, batch.out.values, cache.values
        for seq in range(len(contexts)):
            latent = stored[batch.rows_of(seq)][:, None]
            expected = batch.expected(query[seq : seq + 1], latent, latent[..., : shape.value_size], None)
            require_close(f"out of sequence {seq}", out[seq : seq + 1], expected, 2 * ROUNDING[dtype], 2 * ROUNDING[dtype])

    num_bytes = sum(contexts) * shape.size * 2 + batch.query.num_bytes + batch.out.num_bytes
    return Workload(
        launch,
        check,
        num_bytes,
        2 * sum(contexts) * heads * (shape.size + shape.value_size),
        "copy",
        0.85 if heads <= 32 and len(contexts) >= 16 and min(contexts) >= 4096 else 0.0,
    )
