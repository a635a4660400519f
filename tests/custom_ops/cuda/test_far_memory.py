"""Caches, pools and rows of logits past the reach of 32-bit offsets: only the far end of each is ever touched."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fastengine.custom_ops.cuda import abi
from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.attention_case import Case, Shape
from tests.custom_ops.cuda.memory import Buffer, Kernels, filled, poisoned, poisoned_from
from tests.custom_ops.cuda.test_attention_mla import SIZE, LatentCase

REACH = 2**31 + 1


def blocks_out_of_reach(elements_per_block: int) -> int:
    return -(-REACH // elements_per_block)


@pytest.mark.parametrize(("cache", "wide"), [("bfloat16", False), ("int8", False), ("bfloat16", True)])
def test_attention(cuda: Kernels, rng: np.random.Generator, cache: str, wide: bool) -> None:
    shape = Shape(cache=cache, wide=wide)
    far = blocks_out_of_reach(shape.kv_heads * shape.block_size * shape.size)
    Case(rng, shape, [1, 9, 1], [300, 61, 20], first_block=far).assert_right(cuda)


def test_attention_over_a_latent_cache(cuda: Kernels, rng: np.random.Generator) -> None:
    LatentCase(rng, 2, 16, "bfloat16", [1, 1], [30, 9], first_block=blocks_out_of_reach(16 * SIZE)).assert_right(cuda)


def test_rotary_write(cuda: Kernels, rng: np.random.Generator) -> None:
    size, block_size = 64, 16
    far = blocks_out_of_reach(block_size * size)
    caches = [poisoned_from(far, (far + 1, 1, block_size, size), "bfloat16") for _ in range(2)]
    heads = [filled(rng.normal(size=(1, size)), "bfloat16") for _ in range(3)]
    one = filled(np.array([far * block_size + 3]), "int32")
    sizes = {"num_tokens": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": size, "value_size": size, "rotary_dim": size, "block_size": block_size}
    strides = dict.fromkeys(("query_stride", "key_stride", "value_stride", "query_out_stride", "key_out_stride"), size)
    types = {"dtype": DType.bfloat16, "norm_dtype": DType.float32, "cache_dtype": DType.bfloat16, "interleaved": 0, "epsilon": 0.0}
    cuda.call(
        "rotary_write_kv",
        query=heads[0],
        key=heads[1],
        value=heads[2],
        query_out=heads[0],
        key_cache=caches[0],
        value_cache=caches[1],
        positions=filled(np.array([0]), "int32"),
        cos_sin=filled(np.hstack([np.ones((1, 32)), np.zeros((1, 32))])),
        slot_mapping=one,
        **dict.fromkeys(("key_out", "query_norm", "key_norm", "key_scale", "value_scale")),
        **sizes,
        **strides,
        **types,
    )
    for cache, given in zip(caches, heads[1:], strict=True):
        np.testing.assert_array_equal(cache.stored[far, 0, 3], given.stored[0])
        assert (np.delete(cache.stored[far, 0], 3, axis=0) == 0xFFFF).all()


def test_copies(cuda: Kernels, rng: np.random.Generator) -> None:
    """Blocks of 64 KiB: 2^31 bytes are passed at half of this, 2^31 vectors of 16 bytes would be 32 GiB."""
    far = blocks_out_of_reach(1 << 14)
    source, target = poisoned_from(far, (far + 2, 1 << 14), "float32"), poisoned_from(far, (far + 2, 1 << 14), "float32")
    source.stored[far:] = rng.normal(size=(2, 1 << 14))
    pools = [ctypes.c_void_p(buffer.pointer) for buffer in (source, target)]
    places = {"sources": ctypes.addressof(pools[0]), "targets": ctypes.addressof(pools[1])}
    ids = [filled(np.array([far, far + 1][::step]), "int32") for step in (1, -1)]
    cuda.call("copy_blocks", source_ids=ids[0], target_ids=ids[1], num_pools=1, num_blocks=2, block_bytes=1 << 16, **places)
    np.testing.assert_array_equal(target.stored[far:], source.stored[far:][::-1])


def test_a_mask_of_a_far_row(cuda: Kernels) -> None:
    vocab = 1 << 17
    row = REACH // vocab + 1
    logits = Buffer((row + 1, vocab), "float32")
    mask = np.full((1, vocab // 32), -1)
    mask[0, -1] = 0x7FFFFFFF
    cuda.call("apply_bitmask", logits=logits, mask=filled(mask, "int32"), rows=filled(np.array([row]), "int32"), num_masks=1, vocab_size=vocab)
    assert logits.stored[row, -1] == -np.inf
    assert not logits.stored[row, :-1].any()


def test_tokens_past_the_limit_of_a_grids_other_axes(shim: abi.Operators, rng: np.random.Generator) -> None:
    """More tokens than 65,535 in one call of the operators that have two axes of blocks; one order of threads is enough."""
    cuda, tokens, size = Kernels(shim), 65537, 8
    rows, weights = filled(rng.normal(size=(tokens, size)), "bfloat16"), filled(np.ones((tokens, 1)))
    out, order = poisoned((tokens, size), "bfloat16"), filled(np.arange(tokens)[::-1], "int32")
    sizes = {"row_size": size, "top_k": 1, "dtype": DType.bfloat16}
    cuda.call("moe_combine", rows=rows, base=None, row_of_pair=order, weights=weights, out=out, num_tokens=tokens, **sizes)
    np.testing.assert_array_equal(out.stored, rows.stored[::-1])
    gate_up = filled(np.ones((tokens, 16)), "bfloat16")
    cuda.call("silu_mul", gate_up=gate_up, out=out, num_rows=tokens, half=size, dtype=DType.bfloat16)
    np.testing.assert_allclose(out.values, 1 / (1 + np.exp(-1)), rtol=2**-8)
