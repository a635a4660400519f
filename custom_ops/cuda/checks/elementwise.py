"""Norms, activation, rotary embedding with the cache write, block copies."""

from __future__ import annotations

import ctypes

import numpy as np

from .workload import ROUNDING, Bench, Workload, code, require_close, require_equal


def rms_norm(bench: Bench, rows: int, size: int, dtype: str, residual: bool) -> Workload:
    memory = bench.memory
    x, weight, out = memory.random((rows, size), dtype), memory.random((size,), dtype), memory.poisoned((rows, size), dtype)
    before = memory.random((rows, size), dtype) if residual else None
    # The kernel adds to it in place; the check wants what was there.
    target = memory.upload(before.stored, dtype) if before else None
    types = {"dtype": code(dtype), "weight_dtype": code(dtype), "epsilon": 1e-5}

    def launch() -> None:
        bench.call("rms_norm", x=x, residual=target, weight=weight, out=out, num_rows=rows, row_size=size, **types)

    def check() -> None:
        given = x.values
        if before and target:
            require_close("residual", target.values, given + before.values, ROUNDING[dtype], ROUNDING[dtype])
            given = target.values
        expected = given / np.sqrt((given**2).mean(axis=1, keepdims=True) + 1e-5) * weight.values
        require_close("out", out.values, expected, 2 * ROUNDING[dtype], ROUNDING[dtype])

    return Workload(launch, check, x.num_bytes * (4 if residual else 2), target=0.85)


def silu_mul(bench: Bench, rows: int, half: int, dtype: str) -> Workload:
    gate_up, out = bench.memory.random((rows, 2 * half), dtype, 3.0), bench.memory.poisoned((rows, half), dtype)

    def launch() -> None:
        bench.call("silu_mul", gate_up=gate_up, out=out, num_rows=rows, half=half, dtype=code(dtype))

    def check() -> None:
        gate, up = np.split(gate_up.values, 2, axis=1)
        require_close("out", out.values, gate / (1 + np.exp(-gate)) * up, 2 * ROUNDING[dtype], ROUNDING[dtype])

    return Workload(launch, check, gate_up.num_bytes + out.num_bytes, target=0.85)


def rotary_write_kv(
    bench: Bench, tokens: int, heads: int, kv_heads: int, size: int, dtype: str, cache: str, interleaved: bool, in_place: bool = False
) -> Workload:
    memory, rng, block_size = bench.memory, bench.rng, 16
    width = (heads + 2 * kv_heads) * size
    qkv, query = memory.random((tokens, width), dtype), memory.poisoned((tokens, heads * size), dtype)
    given = qkv.values
    turns = rng.uniform(0, 6.28, (64, size // 2))
    cos_sin = memory.filled(np.hstack([np.cos(turns), np.sin(turns)]))
    positions = memory.filled(rng.integers(0, 64, tokens), "int32")
    blocks = -(-tokens // block_size) + 1
    slots = rng.permutation(blocks * block_size)[:tokens]
    slot_mapping = memory.filled(slots, "int32")
    caches = [memory.poisoned((blocks, kv_heads, block_size, size), cache) for _ in range(2)]
    scales = [memory.poisoned((blocks, kv_heads, block_size)) for _ in range(2)] if cache != dtype else [None, None]
    item = qkv.num_bytes // (tokens * width)
    pointers = {"query": qkv.pointer, "key": qkv.pointer + heads * size * item, "value": qkv.pointer + (heads + kv_heads) * size * item}
    strides = dict.fromkeys(("query_stride", "key_stride", "value_stride", "key_out_stride"), width) | {"query_out_stride": heads * size}
    sizes = {"num_tokens": tokens, "num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "value_size": size, "rotary_dim": size}
    types = {"dtype": code(dtype), "norm_dtype": code("float32"), "cache_dtype": code(cache), "interleaved": int(interleaved), "epsilon": 1e-6}
    if in_place:
        strides["query_out_stride"] = width
    targets = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "key_scale": scales[0],
        "value_scale": scales[1],
        "query_out": pointers["query"] if in_place else query,
    }
    targets["key_out"] = pointers["key"] if in_place else None

    def launch() -> None:
        tables = {"positions": positions, "cos_sin": cos_sin, "slot_mapping": slot_mapping, "block_size": block_size}
        bench.call("rotary_write_kv", **pointers, **strides, **sizes, **types, **targets, **tables, query_norm=None, key_norm=None)

    def rotated(x: np.ndarray) -> np.ndarray:
        half, out = size // 2, x.copy()
        first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
        angles = cos_sin.values[positions.stored][:, None]
        cos, sin = angles[..., :half], angles[..., half:]
        out[..., first], out[..., second] = x[..., first] * cos - x[..., second] * sin, x[..., second] * cos + x[..., first] * sin
        return out

    def check() -> None:
        parts = np.split(given.reshape(tokens, -1, size), [heads, heads + kv_heads], axis=1)
        tolerance = 2 * ROUNDING[dtype]
        out = qkv.values[:, : heads * size] if in_place else query.values
        require_close("query", out.reshape(tokens, heads, size), rotated(parts[0]), tolerance, tolerance)
        for name, array, scale, expected in zip(("key_cache", "value_cache"), caches, scales, (rotated(parts[1]), parts[2]), strict=True):
            stored = array.values[slots // block_size, :, slots % block_size].astype(np.float64)
            if scale is not None:
                stored = stored * scale.values[slots // block_size, :, slots % block_size][..., None]
            largest = np.abs(expected).max(axis=-1, keepdims=True)
            # int8 steps are 1/127 of a head's largest value; fp8 has three mantissa bits.
            slack = {"int8": 0.51 / 127 * largest, "fp8": np.abs(expected) / 16 + largest * 2.0**-16}.get(cache, 0.0 * largest)
            excess = np.maximum(np.abs(stored - expected) - slack, 0.0)
            require_close(name, excess, np.zeros_like(expected), 0.0, tolerance * float(largest.max()))

    written = sum(c.num_bytes // (blocks * block_size) * tokens for c in caches)
    return Workload(launch, check, qkv.num_bytes + query.num_bytes + written, target=0.85)


def copy_blocks(bench: Bench, pools: int, blocks: int, block_bytes: int) -> Workload:
    memory, rng = bench.memory, bench.rng
    sources, targets = ([make((blocks, block_bytes // 4), "float32") for _ in range(pools)] for make in (memory.random, memory.poisoned))
    orders = [rng.permutation(blocks) for _ in range(2)]
    ids = [memory.filled(order, "int32") for order in orders]
    tables = [(ctypes.c_void_p * pools)(*(a.pointer for a in arrays)) for arrays in (sources, targets)]

    def launch() -> None:
        places = {"sources": ctypes.addressof(tables[0]), "targets": ctypes.addressof(tables[1]), "source_ids": ids[0], "target_ids": ids[1]}
        bench.call("copy_blocks", **places, num_pools=pools, num_blocks=blocks, block_bytes=block_bytes)

    def check() -> None:
        for source, target in zip(sources, targets, strict=True):
            require_equal("target", target.stored[orders[1]], source.stored[orders[0]])

    return Workload(launch, check, 2 * pools * blocks * block_bytes, target=0.85)
