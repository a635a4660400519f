"""A tiny decoder with random weights, packed, and the same decoder in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastengine.custom_ops.fused import ARENA_ALIGNMENT, FusedCache, FusedModel, FusedShape, KvType, Layout, Packing, Source, SourceKind, load_library
from fastengine.custom_ops.library import LIBRARY_PATH

SHAPE = {
    "num_layers": 2,
    "hidden": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate": 160,
    "vocab": 300,
    "rms_epsilon": 1e-5,
}
BLOCK_SIZE = 16
CACHE_DTYPES = {KvType.FLOAT32: np.float32, KvType.BFLOAT16: np.uint16, KvType.INT8: np.uint8}


def cos_sin(head_dim: int, max_position: int = 1024) -> np.ndarray:
    angles = np.arange(max_position)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def new_arena(model: FusedModel) -> np.ndarray:
    """Zeroed and aligned memory for a model's weights."""
    memory = np.zeros(model.num_bytes + ARENA_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ARENA_ALIGNMENT
    return memory[start : start + model.num_bytes]


def quantized_q4_1(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GGUF Q4_1 bytes of ``[n, k]`` and the float32 weights that they stand for."""
    blocks = weights.reshape(weights.shape[0], -1, 32)
    low = blocks.min(-1, keepdims=True).astype(np.float16)
    step = ((blocks.max(-1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    q = np.clip(np.rint((blocks - low.astype(np.float32)) / np.maximum(step.astype(np.float32), 1e-8)), 0, 15).astype(np.uint8)
    raw = np.concatenate([step.view(np.uint8), low.view(np.uint8), q[..., :16] | q[..., 16:] << 4], axis=-1)
    return raw, (q * step.astype(np.float32) + low.astype(np.float32)).reshape(weights.shape)


class TinyModel:
    """``weights[(name, layer)]`` are what the file holds, exactly."""

    def __init__(
        self,
        layout: Layout,
        isa: str,
        *,
        num_threads: int = 2,
        bias: bool = False,
        qk_norm: bool = False,
        interleaved: bool = False,
        tied: bool = True,
        **changes: int,
    ):
        rng = np.random.default_rng(11)
        sizes = {**SHAPE, **changes}
        self.shape = FusedShape(
            **sizes, cos_sin=cos_sin(sizes["head_dim"]), rope_interleaved=interleaved, tied=tied, qk_norm=qk_norm, attention_bias=bias
        )
        self.fused = FusedModel(load_library(LIBRARY_PATH), self.shape, Packing(layout), num_threads, isa=isa)
        self.fused_arena = new_arena(self.fused)
        self.fused.bind(self.fused_arena)
        self.sources: dict[tuple[str, int], list[tuple[int, Source]]] = {}
        self.weights: dict[tuple[str, int], np.ndarray] = {}
        self.biases: dict[int, np.ndarray] = {}
        self.has_qk_norm = qk_norm
        s = self.shape
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

        def vector(name: str, size: int, layer: int) -> None:
            self.weights[name, layer] = rng.uniform(0.5, 1.5, size).astype(np.float32)
            self.fused.set_vector(name, self.weights[name, layer], layer)

        def linear(name: str, rows: tuple[int, ...], k: int, layer: int, layout: Layout, bias: np.ndarray | None = None) -> None:
            parts: list[np.ndarray] = []
            for n in rows:
                first_row = sum(len(part) for part in parts)
                weights = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
                if layout == Layout.INT4:
                    raw, weights = quantized_q4_1(weights)
                    source = Source(raw, SourceKind.Q4_1, n)
                else:
                    source = Source(weights, SourceKind.FLOAT32, n)
                parts.append(weights)
                self.sources.setdefault((name, layer), []).append((first_row, source))
                self.fused.set_rows(name, source, layer, first_row=first_row)
            self.weights[name, layer] = np.concatenate(parts)
            if bias is not None:
                self.fused.set_bias(name, bias, layer)

        for layer in range(s.num_layers):
            for name in ("input_norm", "post_attention_norm"):
                vector(name, s.hidden, layer)
            if qk_norm:
                vector("query_norm", s.head_dim, layer)
                vector("key_norm", s.head_dim, layer)
            if bias:
                self.biases[layer] = rng.standard_normal(q + 2 * kv).astype(np.float32)
            linear("qkv", (q, kv, kv), s.hidden, layer, layout, self.biases.get(layer))
            linear("output", (s.hidden,), q, layer, layout)
            linear("gate_up", (s.intermediate, s.intermediate), s.hidden, layer, layout)
            linear("down", (s.hidden,), s.intermediate, layer, layout)
        vector("final_norm", s.hidden, -1)
        table_layout = Layout.FLOAT32 if layout == Layout.FLOAT32 else Layout.INT8
        linear("embedding", (s.vocab,), s.hidden, -1, table_layout)
        if not tied:
            linear("lm_head", (s.vocab,), s.hidden, -1, table_layout)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits ``[T, vocab]`` of one sequence, straight from the formulas."""
        s, get, count = self.shape, self.weights, len(tokens)
        x = get["embedding", -1][tokens].astype(np.float64)
        q_size, kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

        def norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + s.rms_epsilon) * weight

        for layer in range(s.num_layers):
            qkv = norm(x, get["input_norm", layer]) @ get["qkv", layer].T.astype(np.float64) + self.biases.get(layer, 0.0)
            q = qkv[:, :q_size].reshape(count, s.num_heads, -1)
            k = qkv[:, q_size : q_size + kv_size].reshape(count, s.num_kv_heads, -1)
            v = qkv[:, q_size + kv_size :].reshape(count, s.num_kv_heads, -1)
            if self.has_qk_norm:
                q, k = norm(q, get["query_norm", layer]), norm(k, get["key_norm", layer])
            q, k = self._rotated(q), self._rotated(k)
            group = s.num_heads // s.num_kv_heads
            scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * s.head_dim**-0.5
            scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", p, np.repeat(v, group, axis=1)).reshape(count, -1) @ get["output", layer].T
            gate_up = norm(x, get["post_attention_norm", layer]) @ get["gate_up", layer].T.astype(np.float64)
            gate, up = gate_up[:, : s.intermediate], gate_up[:, s.intermediate :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ get["down", layer].T
        head = get["embedding", -1] if s.tied else get["lm_head", -1]
        return norm(x, get["final_norm", -1]) @ head.T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.shape.head_dim // 2
        table = self.shape.cos_sin[: len(x), None, :].astype(np.float64)
        c, sn, out = table[..., :half], table[..., half:], np.empty_like(x)
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.shape.rope_interleaved else (slice(half), slice(half, None))
        out[..., first] = x[..., first] * c - x[..., second] * sn
        out[..., second] = x[..., first] * sn + x[..., second] * c
        return out


@dataclass(frozen=True)
class Row:
    """``tokens`` of one sequence, the first at ``start``; ``blocks`` is its whole block table."""

    tokens: np.ndarray
    start: int
    blocks: list[int]


class TinyCache:
    def __init__(self, kv_type: KvType, shape: FusedShape, num_blocks: int = 400, block_size: int = BLOCK_SIZE):
        pool = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        sides = 2 * shape.num_layers
        self.pools = [np.zeros(pool, CACHE_DTYPES[kv_type]) for _ in range(sides)]
        self.scales = [np.zeros(pool[:3], np.float32) for _ in range(sides)] if kv_type == KvType.INT8 else []
        at = [[a.ctypes.data for a in part] for part in (self.pools[::2], self.pools[1::2], self.scales[::2], self.scales[1::2])]
        self.fused = FusedCache.of(kv_type, block_size, *at)
        self.block_size = block_size


def step(
    model: FusedModel,
    cache: TinyCache,
    rows: list[Row],
    *,
    sampling: np.ndarray | None = None,
    hidden_out: np.ndarray | None = None,
    check_tokens: bool = True,
) -> np.ndarray:
    """Logits ``[R, vocab]`` of the batch's tokens ``sampling`` (int32 ``[R]``; None: all); also checks the argmax against them."""
    tables = np.zeros((len(rows), max(len(r.blocks) for r in rows)), np.int32)
    slots, positions = [], []
    for i, row in enumerate(rows):
        tables[i, : len(row.blocks)] = row.blocks
        at = np.arange(row.start, row.start + len(row.tokens))
        positions.append(at)
        slots.append(tables[i, at // cache.block_size] * cache.block_size + at % cache.block_size)
    starts = np.cumsum([0, *(len(r.tokens) for r in rows)]).astype(np.int32)
    samples = np.arange(starts[-1], dtype=np.int32) if sampling is None else sampling
    logits, tokens = np.empty((samples.size, model.shape.vocab), np.float32), np.empty(samples.size, np.int32)
    model.step(
        np.concatenate([r.tokens for r in rows]).astype(np.int32),
        np.concatenate(positions).astype(np.int32),
        np.concatenate(slots).astype(np.int32),
        starts,
        np.array([r.start + len(r.tokens) for r in rows], np.int32),
        tables,
        samples,
        cache.fused,
        logits=logits,
        token_out=tokens,
        hidden_out=hidden_out,
    )
    if check_tokens:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
    return logits
