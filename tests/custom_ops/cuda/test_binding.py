"""The Paddle binding over the kernels on the host shim, against the reference; and which device runs what."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import Tensor

from fastengine import custom_ops
from fastengine.custom_ops import reference
from fastengine.custom_ops.cuda import build, library, linear, ops
from fastengine.custom_ops.library import LibraryUnavailable
from tests.custom_ops.helpers import Batch, Heads, assert_close, make_batch, tensor, values

BF16 = 2.0**-8
# The first run compiles the binding.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    library.load_whatever_paddle(build.build_shim_paddle_library())


def assert_rounded(actual: Tensor, expected: Tensor, tolerance: float = BF16) -> None:
    """A bfloat16 result within rounding of a float32 one."""
    assert actual.dtype == paddle.bfloat16
    assert_close(actual.astype("float32"), expected, tolerance)


def test_norms_and_activation(rng: np.random.Generator) -> None:
    x, residual, weight = (tensor(rng.normal(size=size), "bfloat16") for size in ((3, 2, 64), (3, 2, 64), (64,)))
    wide = [t.astype("float32") for t in (x, residual, weight)]
    assert_rounded(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(wide[0], wide[2], 1e-5))
    assert_rounded(ops.rms_norm(x, wide[2], 1e-5), reference.rms_norm(wide[0], wide[2], 1e-5))
    expected = reference.add_rms_norm(wide[0], wide[1], wide[2], 1e-5)
    out = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_rounded(residual, wide[1])
    assert_rounded(out, expected, 4 * BF16)
    gate_up = tensor(rng.normal(size=(5, 48)), "bfloat16")
    assert_rounded(ops.silu_mul(gate_up), reference.silu_mul(gate_up.astype("float32")))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_rotary(rng: np.random.Generator, packed: bool, quantized: bool) -> None:
    heads, kv_heads, size, blocks, block_size = 4, 2, 32, 3, 8
    qkv = tensor(rng.normal(size=(5, (heads + 2 * kv_heads) * size)))
    turns = rng.uniform(0, 6, (9, 8))
    table = (tensor([3, 0, 8, 1, 1], "int32"), tensor(np.hstack([np.cos(turns), np.sin(turns)])), tensor([9, -1, 23, 0, 4], "int32"))
    wide = [tensor(np.zeros((blocks, kv_heads, block_size, size))) for _ in range(2)]
    caches = [c.astype("int8") if quantized else c.clone() for c in wide]
    scales = [tensor(np.zeros((blocks, kv_heads, block_size))) if quantized else None for _ in range(2)]
    if packed:
        norms = [tensor(rng.normal(size=size)) for _ in range(2)]
        expected = reference.rotary_write_kv_packed(qkv, heads, kv_heads, *table, *wide, True, *norms, 1e-5)
        query = ops.rotary_write_kv_packed(qkv, heads, kv_heads, *table, *caches, True, *norms, 1e-5, *scales)
    else:
        parts = [t.reshape([5, -1, size]) for t in paddle.split(qkv, [heads * size, kv_heads * size, kv_heads * size], axis=1)]
        query, key, value = (t.clone() for t in parts)
        ops.rotary_write_kv(query, key, value, *table, *caches, False, *scales)
        reference.rotary_write_kv(*parts, *table, *wide)
        expected = parts[0]
        assert_close(key, parts[1], 1e-5)
    assert_close(query, expected, 1e-5)
    for cache, scale, held in zip(caches, scales, wide, strict=True):
        stored = cache.numpy() * scale.numpy()[..., None] if scale is not None else cache.numpy()
        assert_close(tensor(stored), held, 0.01 if quantized else 1e-5)


def halves(batch: Batch) -> Batch:
    """The same batch in bfloat16, and in float32 what that holds."""
    narrow = [t.astype("bfloat16") for t in (batch.query, batch.key_cache, batch.value_cache)]
    return Batch(*narrow, batch.block_tables, batch.query_starts, batch.context_lens)


@pytest.mark.parametrize("window", [0, 20])
def test_attention_with_and_without_a_plan(rng: np.random.Generator, window: int) -> None:
    batch = halves(make_batch(rng, Heads(4, 2, 64, 64), 16, [1, 7, 1, 0], [300, 140, 9, 4]))
    wide = [t.astype("float32") for t in batch.args()[:3]]
    expected = reference.paged_attention(*wide, *batch.args()[3:], 0.125, window)
    assert_rounded(ops.paged_attention(*batch.args(), 0.125, window), expected)
    plan = ops.attention_plan(*batch.args()[3:], 9, 4, 2, 16, window)
    by_mma = ops.paged_attention(*batch.args(), 0.125, window, plan=plan)
    assert_rounded(by_mma, expected)
    by_wgmma = ops.paged_attention(*batch.args(), 0.125, window, plan=plan, wide_prefill=True)
    assert_rounded(by_wgmma, expected)
    # Over more tokens than one of its steps has, sums come in another order: it is another kernel that ran.
    assert window or (values(by_wgmma.astype("float32")) != values(by_mma.astype("float32"))).any()
    by_default = ops.paged_attention(*batch.args(), 0.125, window)
    np.testing.assert_array_equal(values(by_default.astype("float32")), values(by_mma.astype("float32")))


def test_attention_options(rng: np.random.Generator) -> None:
    """One visible token: its weight is 1 less what the sink takes, its value the cache's times its scale."""
    query = tensor(np.zeros((1, 2, 64)), "bfloat16")
    cache = [paddle.to_tensor(rng.integers(-127, 128, (1, 1, 16, 64)).astype(np.int8)) for _ in range(2)]
    batch = (tensor([[0]], "int32"), tensor([0, 1], "int32"), tensor([1], "int32"))
    scales = [tensor(np.full((1, 1, 16), 0.5)) for _ in range(2)]
    out = ops.paged_attention(query, *cache, *batch, 0.1, 0, *scales, sinks=tensor([0.0, -50.0]), max_query_tokens=1)
    value = cache[1].numpy()[0, 0, 0] * 0.5
    assert_rounded(out, tensor(np.stack([value / 2, value])[None]))


def test_latent_attention(rng: np.random.Generator) -> None:
    query, cache = tensor(rng.normal(size=(2, 3, 576)), "bfloat16"), tensor(rng.normal(size=(4, 16, 576)), "bfloat16")
    batch = (tensor([[2, 0], [1, 3]], "int32"), tensor([0, 1, 2], "int32"), tensor([20, 31], "int32"))
    keys = cache.astype("float32").unsqueeze(1)
    expected = reference.paged_attention(query.astype("float32"), keys, keys[..., :512], *batch, 0.05)
    plan = ops.attention_plan(*batch, 2, 3, 1, 16)
    for given in (None, plan):
        assert_rounded(ops.mla_decode(query, cache, *batch, 0.05, plan=given), expected, 2 * BF16)


def test_logits(rng: np.random.Generator) -> None:
    logits, n = tensor(rng.normal(size=(3, 500)) * 3), 3
    assert ops.argmax(logits).tolist() == reference.argmax(logits).tolist()
    settings = (tensor([1.0, 0.0, 0.7]), tensor([0, 5, 9], "int32"), tensor([0.9, 1.0, 0.5]), tensor([0.0, 0.1, 0.0]))
    rows = (tensor([1, 2, 3], "int64"), tensor([5, 6, 7], "int32"))
    assert ops.sample(logits, *settings, *rows).tolist() == reference.sample(logits, *settings, *rows).tolist()
    chosen = tensor([7, 0, 499], "int32")
    for mine, theirs in zip(ops.log_softmax_gather(logits, chosen, 4), reference.log_softmax_gather(logits, chosen, 4), strict=True):
        assert_close(mine.astype("float32"), theirs.astype("float32"), 1e-5)
    penalties = [tensor(rng.uniform(0.5, 2, n)) for _ in range(3)]
    packed = [tensor(x, "int32") for x in ([1, 2, 2, 499, 1], [0, 2, 4, 5], [1, 2, 5], [3, 3])]
    bias = (tensor([0.5, -float("inf")]), tensor([0, 1, 2, 2], "int32"))
    mine, theirs = logits.clone(), logits.clone()
    for target, backend in ((mine, ops), (theirs, reference)):
        backend.apply_penalties(target, *penalties, *packed, *bias)
    np.testing.assert_allclose(values(mine), values(theirs), rtol=1e-6)
    mask = np.full((1, 16), -1, np.int32)
    mask[0, 1] = ~2
    ops.apply_bitmask(mine, tensor(mask, "int32"), tensor([2], "int32"))
    assert np.flatnonzero(~np.isfinite(values(mine)[2])).tolist() == [33]


def test_experts(rng: np.random.Generator) -> None:
    """Every expert multiplies by its number: the combined result says who was chosen."""
    logits, x = tensor(rng.normal(size=(6, 8))), tensor(rng.normal(size=(6, 16)), "bfloat16")
    expert_ids, weights = ops.moe_gate(logits, 2)
    np.testing.assert_array_equal(expert_ids.numpy(), np.argsort(-logits.numpy(), axis=1)[:, :2])
    np.testing.assert_allclose(weights.numpy().sum(axis=1), 1.0, rtol=1e-6)
    starts, pair_of_row, row_of_pair = ops.moe_permute(expert_ids, 0, 8, 4)
    rows = values(ops.moe_gather(x, pair_of_row, 2))
    expert_of_row = np.searchsorted(starts.numpy(), np.arange(len(rows)), side="right") - 1
    out = ops.moe_combine(tensor(rows * expert_of_row[:, None], "bfloat16"), row_of_pair, weights, x)
    expected = values(x) * (1 + (weights.numpy() * expert_ids.numpy()).sum(axis=1, keepdims=True))
    assert_rounded(out, tensor(expected), 2 * BF16)


def test_quantized_product(rng: np.random.Generator) -> None:
    quantized, x = rng.integers(0, 16, (32, 64)).astype(np.uint8), tensor(rng.normal(size=(2, 64)), "bfloat16")
    scales, zeros, bias = rng.uniform(0.5, 1, (2, 32)), rng.integers(0, 16, (2, 32)), tensor(rng.normal(size=32), "bfloat16")
    weight = (quantized - zeros.repeat(32, axis=0).T.astype(float)) * scales.repeat(32, axis=0).T
    packed = paddle.to_tensor(linear.pack_weight(quantized, 4))
    out = ops.quantized_gemm(x, packed, tensor(scales), 4, 32, paddle.to_tensor(zeros.astype(np.uint8)), bias)
    assert_rounded(out, tensor(values(x) @ weight.T + values(bias)))


def test_block_copies(rng: np.random.Generator) -> None:
    sources, targets = ([tensor(rng.normal(size=(3, 8))) for _ in range(2)] for _ in range(2))
    before = [t.numpy().copy() for t in targets]
    ops.copy_blocks(sources, targets, tensor([2, 0], "int32"), tensor([0, 1], "int32"))
    for source, target, old in zip(sources, targets, before, strict=True):
        np.testing.assert_array_equal(target.numpy(), np.vstack([source.numpy()[[2, 0]], old[2:]]))


def test_wrong_arguments_are_named(rng: np.random.Generator) -> None:
    x, weight = tensor(rng.normal(size=(2, 64))), tensor(np.ones(64))
    with pytest.raises(ValueError, match=r"^weight: expected shape \[64\]"):
        ops.rms_norm(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match=r"^x: expected float32, bfloat16 or float16"):
        ops.rms_norm(x.astype("float64"), weight, 1e-5)
    with pytest.raises(ValueError, match=r"^rms_norm: no CUDA kernel covers"):
        ops.rms_norm(x[:, :60].clone(), weight[:60].clone(), 1e-5)
    with pytest.raises(ValueError, match=r"^residual: is changed in place"):
        ops.add_rms_norm(x, tensor(rng.normal(size=(64, 2))).T, weight, 1e-5)
    cache, batch = paddle.zeros([1, 1, 16, 64], "int8"), (tensor([[0]], "int32"), tensor([0, 1], "int32"), tensor([1], "int32"))
    with pytest.raises(ValueError, match=r"^key_scale: an int8 cache needs"):
        ops.paged_attention(tensor(np.zeros((1, 1, 64)), "bfloat16"), cache, cache, *batch, 1.0)
    with pytest.raises(ValueError, match=r"^plan: expected shape"):
        ops.mla_decode(tensor(np.zeros((1, 1, 576)), "bfloat16"), tensor(np.zeros((1, 16, 576)), "bfloat16"), *batch, 1.0, plan=batch[0][0])


def test_memory_that_vectors_can_not_be_read_from_is_refused(rng: np.random.Generator) -> None:
    """A view may begin anywhere; a GPU would end the process' CUDA context over it."""
    flat = tensor(rng.normal(size=4 + 3 * 64), "bfloat16")
    odd, even = (flat[start : start + 3 * 64].reshape([3, 64]) for start in (1, 0))
    assert odd.data_ptr() % 16 == 2
    assert even.data_ptr() % 16 == 0
    weight = tensor(np.ones(64), "bfloat16")
    ops.rms_norm(even, weight, 1e-5)
    ops.silu_mul(even)
    begins = "expected memory that begins at a multiple of 16 bytes"
    with pytest.raises(ValueError, match=f"^x: {begins}"):
        ops.rms_norm(odd, weight, 1e-5)
    with pytest.raises(ValueError, match=f"^weight: {begins}"):
        ops.rms_norm(even, odd[0], 1e-5)
    with pytest.raises(ValueError, match=f"^residual: {begins}"):
        ops.add_rms_norm(even, odd, weight, 1e-5)
    with pytest.raises(ValueError, match=f"^gate_up: {begins}"):
        ops.silu_mul(odd)
    cache, batch = even.reshape([3, 1, 16, 4]), (tensor([[0]], "int32"), tensor([0, 1], "int32"), tensor([1], "int32"))
    with pytest.raises(ValueError, match=f"^key_cache: {begins}"):
        ops.paged_attention(cache[:1, :, 0], odd.reshape([3, 1, 16, 4]), cache, *batch, 1.0)
    ids = tensor([0], "int32")
    for which in range(2):
        pools = [[odd] if which == i else [even.clone()] for i in range(2)]
        with pytest.raises(ValueError, match=f"^{('sources', 'targets')[which]}: {begins}"):
            ops.copy_blocks(*pools, ids, ids)


# ---- which device runs what ----------------------------------------------------------------------------


def test_every_operator_takes_the_same_arguments_on_the_gpu() -> None:
    for name in custom_ops.OPERATORS:
        parameters = list(inspect.signature(getattr(custom_ops, name)).parameters.values())
        common = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        mine = list(inspect.signature(getattr(ops, name)).parameters.values())
        assert mine[: len(common)] == common, name
        assert all(p.default is not inspect.Parameter.empty for p in mine[len(common) :]), name
        assert {p.name for p in parameters[len(common) :]} <= {p.name for p in mine[len(common) :]}, name


def test_what_only_the_gpu_knows_is_refused_elsewhere(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    query, cache = tensor(rng.normal(size=(1, 2, 16))), tensor(rng.normal(size=(1, 2, 16, 16)))
    batch = (tensor([[0]], "int32"), tensor([0, 1], "int32"), tensor([1], "int32"))
    with pytest.raises(ValueError, match=r"^max_query_tokens: only the compiled CUDA operators take it"):
        custom_ops.paged_attention(query, cache, cache, *batch, 0.25, max_query_tokens=1)
    monkeypatch.setattr(custom_ops, "_backend_of", lambda tensor: ops)
    halves = (query.astype("bfloat16"), cache.astype("bfloat16"), cache.astype("bfloat16"))
    sinks = tensor([1e4, 1e4])
    out = custom_ops.paged_attention(*halves, *batch, 0.25, sinks=sinks, max_query_tokens=1)
    assert not out.astype("float32").any()  # the sinks take all the weight


def test_what_keeps_the_cuda_operators_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ops, "_no_cuda_reason", "libfastengine_cuda.so was not built")
    with pytest.raises(LibraryUnavailable, match="was not built"):
        custom_ops.require_cuda()
    monkeypatch.setattr(custom_ops, "_no_cuda_reason", "")
    custom_ops.require_cuda()


def test_the_place_of_the_first_tensor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    on_gpu = SimpleNamespace(place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(custom_ops, "_gpu_backend", SimpleNamespace(argmax=lambda logits: calls.append(logits)))
    custom_ops.argmax(on_gpu)
    assert calls == [on_gpu]
    assert custom_ops.argmax(tensor([[0.0, 2.0, 1.0]])).tolist() == [1]
    assert len(calls) == 1


def test_compiled_ops_names_what_the_current_device_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ops, "_gpu_backend", ops)
    assert "cuda" not in custom_ops.compiled_ops().values()
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    assert custom_ops.compiled_ops() == dict.fromkeys(custom_ops.OPERATORS, "cuda")
    monkeypatch.setattr(custom_ops, "_gpu_backend", reference)
    assert custom_ops.compiled_ops() == dict.fromkeys(custom_ops.OPERATORS, "reference")


def test_without_the_library_a_paddle_with_cuda_warns_and_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryUnavailable("was not built")

    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(library, "load", missing)
    with pytest.warns(RuntimeWarning, match="reference operators on the GPU: was not built"):
        assert custom_ops._choose_gpu_backend()[0] is reference
    monkeypatch.setattr(library, "load", lambda: None)
    assert custom_ops._choose_gpu_backend() == (ops, "")


def test_a_library_that_can_not_be_used_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not paddle.is_compiled_with_cuda():
        with pytest.raises(LibraryUnavailable, match="built without CUDA"):
            library.load(tmp_path / "none.so")
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    with pytest.raises(LibraryUnavailable, match="was not built"):
        library.load(tmp_path / "none.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(LibraryUnavailable, match="does not load"):
        library.load(broken)
