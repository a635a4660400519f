"""RMSNorm, SiLU-mul, rotary embedding with KV write, and block copies, against float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.memory import FP8_TABLE, Buffer, Kernels, copied, decode, encode, filled, poisoned, rounded

FLOATS = ["float32", "bfloat16", "float16"]
# A result rounded to nearest, from values that are exact in the type; float32 arithmetic between.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def code(dtype: str) -> int:
    return int(getattr(DType, dtype))


def assert_close(actual: Buffer, expected: np.ndarray, dtype: str, slack: float = 1.01) -> None:
    np.testing.assert_allclose(actual.values, expected, rtol=slack * TOLERANCE[dtype], atol=slack * TOLERANCE[dtype] * 1e-2 + 1e-6)


def normalized(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (9, 576), (11, 512), (3, 1024), (2, 4096), (2, 9000), (1, 32768)])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(cuda: Kernels, rng: np.random.Generator, dtype: str, rows: int, size: int, residual: bool) -> None:
    weight_dtype = "float32" if residual else dtype
    x, before, weight = rng.normal(size=(rows, size)), rng.normal(size=(rows, size)) * 3, rng.normal(size=size)
    given, stream, out = filled(x, dtype), filled(before, dtype), poisoned((rows, size), dtype)
    cuda.call(
        "rms_norm",
        x=given,
        residual=stream if residual else None,
        weight=filled(weight, weight_dtype),
        out=out,
        num_rows=rows,
        row_size=size,
        dtype=code(dtype),
        weight_dtype=code(weight_dtype),
        epsilon=1e-5,
    )
    total = given.values
    if residual:
        total = rounded((given.values + rounded(before, dtype)).astype(np.float32), dtype)
        np.testing.assert_array_equal(stream.values, total)
    assert_close(out, normalized(total, rounded(weight, weight_dtype), 1e-5), dtype)


def test_what_no_kernel_covers_is_refused(cuda: Kernels) -> None:
    fields = dict.fromkeys(("x", "residual", "weight", "out"), None)
    for size, dtype, weight_dtype in ((12, 0, 0), (40960, 0, 0), (8, DType.int8, 0), (8, DType.bfloat16, DType.float16)):
        status = cuda.status("rms_norm", **fields, num_rows=1, row_size=size, dtype=dtype, weight_dtype=weight_dtype, epsilon=0.0)
        assert status == -1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "half"), [(1, 8), (5, 1536), (2, 4104)])
def test_silu_mul(cuda: Kernels, rng: np.random.Generator, dtype: str, rows: int, half: int) -> None:
    given, out = filled(rng.normal(size=(rows, 2 * half)) * 4, dtype), poisoned((rows, half), dtype)
    cuda.call("silu_mul", gate_up=given, out=out, num_rows=rows, half=half, dtype=code(dtype))
    gate, up = np.split(given.values, 2, axis=1)
    assert_close(out, gate / (1 + np.exp(-gate)) * up, dtype)


@dataclass(frozen=True)
class Rope:
    heads: int
    kv_heads: int
    size: int
    value_size: int
    rotary_dim: int
    interleaved: bool


ROPES = [
    Rope(3, 1, 64, 64, 64, False),
    Rope(3, 1, 64, 64, 64, True),
    Rope(2, 2, 128, 128, 64, False),
    Rope(4, 2, 96, 96, 24, False),  # partner chunks not aligned
    Rope(4, 2, 96, 72, 40, True),
    Rope(2, 1, 256, 128, 256, False),
    Rope(1, 1, 16, 16, 4, False),
]


def rotated(heads: np.ndarray, angles: tuple[np.ndarray, np.ndarray], rope: Rope) -> np.ndarray:
    half = rope.rotary_dim // 2
    first = slice(0, 2 * half, 2) if rope.interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if rope.interleaved else slice(half, 2 * half)
    out = heads.copy()
    cos, sin = angles
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out


class RotaryCase:
    """One call on a packed projection output, with what it should leave."""

    tokens, blocks, block_size = 7, 3, 16

    def __init__(self, rng: np.random.Generator, rope: Rope, dtype: str, cache_dtype: str, norm: bool):
        self.rope, self.dtype, self.cache_dtype = rope, dtype, cache_dtype
        widths = (rope.heads * rope.size, rope.kv_heads * rope.size, rope.kv_heads * rope.value_size)
        self.starts = np.cumsum((0, *widths))
        self.qkv = filled(rng.normal(size=(self.tokens, self.starts[-1])), dtype)
        self.given = self.qkv.values.copy()
        self.slots = filled(np.array([5, -1, 47, 0, 16, -1, 31]), "int32")
        self.positions = filled(rng.integers(0, 9, self.tokens), "int32")
        turns = rng.uniform(0, 6.28, size=(9, rope.rotary_dim // 2))
        self.cos_sin = filled(np.hstack([np.cos(turns), np.sin(turns)]), "float32")
        self.norms = [filled(rng.normal(size=rope.size), dtype) for _ in range(2)] if norm else None
        rows = (self.blocks, rope.kv_heads, self.block_size)
        self.caches = [poisoned((*rows, size), cache_dtype) for size in (rope.size, rope.value_size)]
        self.scales = [poisoned(rows) for _ in range(2)] if cache_dtype == "int8" or (cache_dtype == "fp8" and norm) else None
        self.query_out = poisoned((self.tokens, widths[0]), dtype)

    def run(self, cuda: Kernels, in_place: bool) -> None:
        rope, item = self.rope, self.qkv.stored.itemsize
        query, key, value = (self.qkv.pointer + int(start) * item for start in self.starts[:3])
        width = int(self.starts[-1])
        cuda.call(
            "rotary_write_kv",
            query=query,
            key=key,
            value=value,
            query_stride=width,
            key_stride=width,
            value_stride=width,
            query_out=query if in_place else self.query_out.pointer,
            key_out=key if in_place else None,
            query_out_stride=width if in_place else rope.heads * rope.size,
            key_out_stride=width,
            query_norm=self.norms[0] if self.norms else None,
            key_norm=self.norms[1] if self.norms else None,
            positions=self.positions,
            cos_sin=self.cos_sin,
            slot_mapping=self.slots,
            key_cache=self.caches[0],
            value_cache=self.caches[1],
            key_scale=self.scales[0] if self.scales else None,
            value_scale=self.scales[1] if self.scales else None,
            num_tokens=self.tokens,
            num_heads=rope.heads,
            num_kv_heads=rope.kv_heads,
            head_size=rope.size,
            value_size=rope.value_size,
            rotary_dim=rope.rotary_dim,
            block_size=self.block_size,
            dtype=code(self.dtype),
            norm_dtype=code(self.dtype),
            cache_dtype=code(self.cache_dtype),
            interleaved=int(rope.interleaved),
            epsilon=1e-6,
        )

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rope, (q, k, v, end) = self.rope, self.starts
        heads = [
            self.given[:, a:b].reshape(self.tokens, -1, size) for a, b, size in ((q, k, rope.size), (k, v, rope.size), (v, end, rope.value_size))
        ]
        turns = self.cos_sin.values[self.positions.stored]
        angles = np.split(turns[:, None, :], 2, axis=2)
        for i in range(2):
            if self.norms:
                heads[i] = normalized(heads[i], self.norms[i].values, 1e-6)
            heads[i] = rotated(heads[i], (angles[0], angles[1]), rope)
        return heads[0], heads[1], heads[2]

    def stored_heads(self, which: int) -> np.ndarray:
        """What the cache holds at the stored tokens' slots, scales applied."""
        slots = self.slots.stored[self.slots.stored >= 0]
        cache = self.caches[which].values.astype(np.float64)
        if self.scales:
            cache = cache * self.scales[which].values[..., None]
        return cache[slots // self.block_size, :, slots % self.block_size]

    def assert_only_slots_written(self) -> None:
        slots = self.slots.stored[self.slots.stored >= 0]
        untouched = np.ones((self.blocks, self.block_size), dtype=bool)
        untouched[slots // self.block_size, slots % self.block_size] = False
        for buffer in (*self.caches, *(self.scales or ())):
            raw = np.moveaxis(buffer.stored, 1, 2)[untouched]
            assert (np.ascontiguousarray(raw).view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cache", ["same", "int8", "fp8"])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_write_kv(cuda: Kernels, rng: np.random.Generator, rope: Rope, dtype: str, cache: str, norm: bool) -> None:
    case = RotaryCase(rng, rope, dtype, dtype if cache == "same" else cache, norm)
    in_place = norm
    case.run(cuda, in_place)
    query, key, value = case.expected()
    out = case.qkv.values[:, : case.starts[1]] if in_place else case.query_out.values
    tolerance = 2 * TOLERANCE[dtype]
    np.testing.assert_allclose(out.reshape(query.shape), query, rtol=tolerance, atol=tolerance)
    if in_place:
        np.testing.assert_allclose(case.qkv.values[:, case.starts[1] : case.starts[2]].reshape(key.shape), key, rtol=tolerance, atol=tolerance)
    case.assert_only_slots_written()
    written = case.slots.stored >= 0
    for which, heads in enumerate((key[written], value[written])):
        largest = np.abs(heads).max(axis=-1, keepdims=True)
        # int8 steps are 1/127 of the head's largest value; fp8 has three mantissa bits.
        slack = {"int8": 0.51 / 127 * largest, "fp8": np.abs(heads) / 16 + largest * 2.0**-16 + 2.0**-10}.get(cache, 0.0)
        assert (np.abs(case.stored_heads(which) - heads) <= slack + tolerance * np.maximum(1, np.abs(heads))).all()


def test_fp8_rounds_to_nearest_even_and_saturates(cuda: Kernels) -> None:
    """All fp8 values, the midpoints between them, and values past the largest, through the cache write."""
    exact = np.concatenate([FP8_TABLE, (FP8_TABLE[1:] + FP8_TABLE[:-1]) / 2, [449.0, 1e6, 465.0]])
    values = np.resize(np.concatenate([exact, -exact]), 512).reshape(2, 256)
    case = RotaryCase(np.random.default_rng(0), Rope(1, 1, 256, 256, 4, True), "float32", "fp8", False)
    case.qkv.stored[:, 512:] = 0
    case.qkv.stored[[0, 2], 512:] = values
    case.run(cuda, False)
    stored = case.caches[1].stored[[0, 2], 0, [5, 15]]
    np.testing.assert_array_equal(decode(stored, "fp8"), decode(encode(values, "fp8"), "fp8"))


def test_copy_blocks_between_pools(cuda: Kernels, rng: np.random.Generator) -> None:
    sources = [filled(rng.normal(size=(5, 12))) for _ in range(3)]
    targets = [poisoned((4, 12)) for _ in range(3)]
    pointers = [(ctypes.c_void_p * 3)(*(buffer.pointer for buffer in buffers)) for buffers in (sources, targets)]
    source_ids, target_ids = filled(np.array([4, 0, 4]), "int32"), filled(np.array([1, 3, 0]), "int32")
    fields = {"sources": ctypes.addressof(pointers[0]), "targets": ctypes.addressof(pointers[1]), "num_pools": 3, "num_blocks": 3, "block_bytes": 48}
    cuda.call("copy_blocks", source_ids=source_ids, target_ids=target_ids, **fields)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target.stored[[1, 3, 0]], source.stored[[4, 0, 4]])
        assert np.isnan(target.stored[2]).all()
    # Gathering into a dense buffer: no target ids.
    before = [copied(target) for target in targets]
    cuda.call("copy_blocks", source_ids=source_ids, target_ids=None, **fields)
    for source, target, old in zip(sources, targets, before, strict=True):
        np.testing.assert_array_equal(target.stored[:3], source.stored[[4, 0, 4]])
        np.testing.assert_array_equal(target.stored[3], old.stored[3])


def test_copy_blocks_moves_large_blocks_whole(cuda: Kernels, rng: np.random.Generator) -> None:
    source, target = filled(rng.normal(size=(2, 5000))), poisoned((2, 5000))
    fields = {"sources": ctypes.c_void_p(source.pointer), "targets": ctypes.c_void_p(target.pointer)}
    addresses = {name: ctypes.addressof(value) for name, value in fields.items()}
    ids = filled(np.array([1, 0]), "int32")
    cuda.call("copy_blocks", source_ids=None, target_ids=ids, num_pools=1, num_blocks=2, block_bytes=20000, **addresses)
    np.testing.assert_array_equal(target.stored, source.stored[::-1])
