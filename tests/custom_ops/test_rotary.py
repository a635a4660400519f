from __future__ import annotations

import numpy as np
import pytest
from paddle import Tensor

from fastengine import custom_ops as ops
from fastengine.custom_ops import reference
from tests.custom_ops.helpers import Heads, assert_close, assert_identical, tensor

HEADS = [Heads(9, 3, 64, 64), Heads(4, 1, 16, 16), Heads(2, 2, 128, 128), Heads(4, 4, 24, 20), Heads(3, 1, 256, 256)]


def tables(rng: np.random.Generator, tokens: int, rotary_dim: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    angles = rng.uniform(0, 6.28, size=(50, rotary_dim // 2))
    mapping = rng.permutation(slots)[:tokens]
    mapping[::3] = -1
    return tensor(rng.integers(0, 50, tokens), "int32"), tensor(np.hstack([np.cos(angles), np.sin(angles)])), tensor(mapping, "int32")


def caches(heads: Heads, block_size: int, dtype: str) -> tuple[Tensor, Tensor]:
    shape = (6, heads.kv, block_size)
    return tensor(np.full((*shape, heads.size), 7.0), dtype), tensor(np.full((*shape, heads.value_size), 7.0), dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("partial", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_separate_tensors_match_the_reference(rng: np.random.Generator, heads: Heads, dtype: str, partial: int, interleaved: bool) -> None:
    query, key, value = (rng.normal(size=(11, n, d)) for n, d in ((heads.query, heads.size), (heads.kv, heads.size), (heads.kv, heads.value_size)))
    positions, cos_sin, slots = tables(rng, 11, heads.size // partial, 6 * 8)
    results = []
    for function in (ops.rotary_write_kv, reference.rotary_write_kv):
        args = (tensor(query), tensor(key), tensor(value), positions, cos_sin, slots, *caches(heads, 8, dtype))
        function(*args, interleaved)
        results.append(args)
    for index in (0, 1, 2, 7):
        assert_close(results[0][index], results[1][index])
    # A bfloat16 may round to the neighbour when the float32 differs in its last bit.
    assert_close(results[0][6], results[1][6], 2e-6 if dtype == "float32" else 2**-8)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_matches_the_reference(rng: np.random.Generator, heads: Heads, dtype: str, normed: bool, interleaved: bool) -> None:
    width = (heads.query + heads.kv) * heads.size + heads.kv * heads.value_size
    qkv = tensor(rng.normal(size=(11, width)))
    before = qkv.clone()
    norms = (tensor(rng.normal(size=heads.size)), tensor(rng.normal(size=heads.size))) if normed else (None, None)
    rotary = tables(rng, 11, heads.size, 6 * 8)
    results = []
    for function in (ops.rotary_write_kv_packed, reference.rotary_write_kv_packed):
        stored = caches(heads, 8, dtype)
        query = function(qkv, heads.query, heads.kv, *rotary, *stored, interleaved, *norms, 1e-5)
        results.append((query, *stored))
    assert_identical(qkv, before)
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], 2e-6 if dtype == "float32" else 2**-8)
    assert_identical(results[0][2], results[1][2])


@pytest.mark.usefixtures("two_threads")
def test_token_alone_equals_token_in_a_batch(rng: np.random.Generator) -> None:
    heads = Heads(9, 3, 64, 64)
    qkv = tensor(rng.normal(size=(200, 15 * 64)))
    positions, cos_sin, _ = tables(rng, 200, 64, 200)
    slots = tensor(np.arange(200), "int32")
    stored = caches(heads, 40, "float32")
    together = ops.rotary_write_kv_packed(qkv, 9, 3, positions, cos_sin, slots, *stored)
    single = caches(heads, 40, "float32")
    for t in (0, 57, 199):
        part = slice(t, t + 1)
        alone = ops.rotary_write_kv_packed(qkv[part], 9, 3, positions[part], cos_sin, slots[part], *single)
        assert_identical(alone[0], together[t])
        assert_identical(single[0][t // 40, :, t % 40], stored[0][t // 40, :, t % 40])


def good_arguments() -> dict[str, Tensor]:
    return {
        "query": tensor(np.zeros((3, 4, 16))),
        "key": tensor(np.zeros((3, 2, 16))),
        "value": tensor(np.zeros((3, 2, 16))),
        "positions": tensor([0, 1, 2], "int32"),
        "cos_sin": tensor(np.zeros((5, 16))),
        "slot_mapping": tensor([0, 1, -1], "int32"),
        "key_cache": tensor(np.zeros((4, 2, 8, 16))),
        "value_cache": tensor(np.zeros((4, 2, 8, 16))),
    }


BAD = [
    ("key", tensor(np.zeros((3, 2, 8)))),
    ("value", tensor(np.zeros((3, 1, 16)))),
    ("positions", tensor([0, 1, 5], "int32")),
    ("positions", tensor([0, 1, -1], "int32")),
    ("positions", tensor([0, 1], "int32")),
    ("positions", tensor([0, 1, 2], "int64")),
    ("cos_sin", tensor(np.zeros((5, 18)))),
    ("slot_mapping", tensor([0, 1, 32], "int32")),
    ("slot_mapping", tensor([0, 1, -2], "int32")),
    ("key_cache", tensor(np.zeros((4, 3, 8, 16)))),
    ("value_cache", tensor(np.zeros((4, 2, 8, 16)), "bfloat16")),
]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("function", [ops.rotary_write_kv, reference.rotary_write_kv])
@pytest.mark.parametrize(("argument", "bad"), BAD)
def test_bad_arguments_name_the_argument(function: object, argument: str, bad: Tensor) -> None:
    assert callable(function)
    function(**good_arguments())
    with pytest.raises(ValueError, match=rf"^{argument}: "):
        function(**{**good_arguments(), argument: bad})


@pytest.mark.usefixtures("isa")
def test_a_view_can_not_be_changed_in_place() -> None:
    packed = tensor(np.zeros((3, 8, 16)))
    with pytest.raises(ValueError, match=r"^query: .*contiguous"):
        ops.rotary_write_kv(**{**good_arguments(), "query": packed[:, :4]})


@pytest.mark.usefixtures("isa")
def test_packed_names_a_wrong_width() -> None:
    good = good_arguments()
    rest = [good[name] for name in ("positions", "cos_sin", "slot_mapping", "key_cache", "value_cache")]
    with pytest.raises(ValueError, match=r"^qkv: "):
        ops.rotary_write_kv_packed(tensor(np.zeros((3, 100))), 4, 2, *rest)
    with pytest.raises(ValueError, match=r"^q_norm: "):
        ops.rotary_write_kv_packed(tensor(np.zeros((3, 128))), 4, 2, *rest, q_norm=tensor(np.zeros(8)))
