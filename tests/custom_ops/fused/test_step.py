"""The fused step against the formulas, and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from fastengine.custom_ops.fused import FusedCache, FusedError, KvType, Layout, Source, SourceKind, hash_rows, load_library
from fastengine.custom_ops.library import LIBRARY_PATH

from .tiny import BLOCK_SIZE, Row, TinyCache, TinyModel, new_arena, step

LAYOUTS = list(Layout)
KV_TYPES = list(KvType)
# Relative to the logits' standard deviation: what eight bits, or a bfloat16 cache, may cost.
TOLERANCE = {Layout.FLOAT32: 2e-4, Layout.INT8: 0.05, Layout.INT4: 0.05}
KV_TOLERANCE = {KvType.FLOAT32: 0.0, KvType.BFLOAT16: 0.03, KvType.INT8: 0.06}


def blocks_for(length: int, first: int) -> list[int]:
    return list(range(first, first + -(-length // BLOCK_SIZE)))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(((got - want) ** 2).mean()) / want.std())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_prefill_equals_the_formulas(isa: str, layout: Layout, kv_type: KvType) -> None:
    model = TinyModel(layout, isa)
    tokens = np.random.default_rng(1).integers(0, 300, 150)
    got = step(model.fused, TinyCache(kv_type, model.shape), [Row(tokens, 0, blocks_for(150, 3))])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[layout] + KV_TOLERANCE[kv_type]
    model.fused.close()


@pytest.mark.parametrize("variant", [{"bias": True}, {"qk_norm": True}, {"interleaved": True}, {"tied": False}])
def test_family_variants_equal_the_formulas(isa: str, variant: dict[str, bool]) -> None:
    model = TinyModel(Layout.FLOAT32, isa, **variant)
    tokens = np.random.default_rng(2).integers(0, 300, 40)
    got = step(model.fused, TinyCache(KvType.FLOAT32, model.shape), [Row(tokens, 0, blocks_for(40, 0))])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[Layout.FLOAT32]
    model.fused.close()


@pytest.mark.parametrize("variant", [{}, {"bias": True}, {"qk_norm": True}, {"interleaved": True}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_qkv_finishes_equal_the_formulas(isa: str, head_dim: int, variant: dict[str, bool]) -> None:
    model = TinyModel(Layout.FLOAT32, isa, head_dim=head_dim, num_layers=1, **variant)
    tokens = np.random.default_rng(2).integers(0, 300, 140)
    got = step(model.fused, TinyCache(KvType.INT8, model.shape), [Row(tokens, 0, blocks_for(140, 0))])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[Layout.FLOAT32] + KV_TOLERANCE[KvType.INT8]
    model.fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kv_type", "head_dim"), [*((kv_type, 32) for kv_type in KV_TYPES), (KvType.INT8, 64), (KvType.INT8, 128)])
def test_a_row_is_bit_identical_in_any_batch(isa: str, layout: Layout, kv_type: KvType, head_dim: int) -> None:
    """One sequence whole, in chunks, and token by token amid changing company; also with one thread."""
    model = TinyModel(layout, isa, head_dim=head_dim)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 300, 90)
    alone = step(model.fused, TinyCache(kv_type, model.shape), [Row(tokens, 0, blocks_for(90, 7))])
    cache, done, parts = TinyCache(kv_type, model.shape), 0, []
    for length in (1, 30, 2, 17, 1, 1, 5, 33):
        model.fused.num_threads = 1 + done % 2
        others = [Row(rng.integers(0, 300, n), 0, blocks_for(n, 20 + 5 * i)) for i, n in enumerate(rng.integers(1, 60, done % 5))]
        at = len(others) // 2
        rows = [*others[:at], Row(tokens[done : done + length], done, blocks_for(90, 7)), *others[at:]]
        before = sum(len(r.tokens) for r in rows[:at])
        parts.append(step(model.fused, cache, rows)[before : before + length])
        done += length
    np.testing.assert_array_equal(np.concatenate(parts), alone)
    model.fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [127, 250])
def test_a_prompt_is_bit_identical_however_threads_share_it(isa: str, layout: Layout, length: int) -> None:
    """Threads have panels of their own, or rows, in one part or several."""
    model = TinyModel(layout, isa, head_dim=64, num_layers=2)
    tokens = np.random.default_rng(6).integers(0, 300, length)
    results = []
    for num_threads in (1, 2, 3):
        model.fused.num_threads = num_threads
        results.append(step(model.fused, TinyCache(KvType.INT8, model.shape), [Row(tokens, 0, blocks_for(length, 0))]))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    assert relative_error(results[0], model.logits(tokens)) < TOLERANCE[layout] + KV_TOLERANCE[KvType.INT8]
    model.fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 64}, {"num_heads": 3, "num_kv_heads": 1}, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16}])
def test_rows_that_do_not_sample_may_stop_early_and_nothing_else_changes(isa: str, layout: Layout, kv_type: KvType, sizes: dict[str, int]) -> None:
    """Chunks and decodes of which all, some or none sample; the last sizes have queries and keys in one panel of QKV."""
    if layout == Layout.INT4 and sizes.get("head_dim") == 16:
        pytest.skip("48 columns are no whole blocks of Q4_1")
    model = TinyModel(layout, isa, bias=True, qk_norm=True, **sizes)
    rng = np.random.default_rng(8)
    whole, partly = TinyCache(kv_type, model.shape), TinyCache(kv_type, model.shape)
    done = np.zeros(4, int)
    for lengths, sampled in [
        ((40, 1, 0, 7), (0, 2)),
        ((1, 130, 0, 1), (0, 1)),
        ((1, 1, 3, 33), ()),
        ((1, 1, 1, 1), (0, 2, 3)),
        ((2, 9, 1, 20), (0, 1, 2, 3)),
    ]:
        rows = [Row(rng.integers(0, 300, n), done[i], blocks_for(200, 20 * i)) for i, n in enumerate(lengths) if n]
        ends = np.cumsum([len(row.tokens) for row in rows]) - 1
        samples = ends[list(sampled)].astype(np.int32)
        want, hidden = step(model.fused, whole, rows), np.empty((samples.size, model.shape.hidden), np.float32)
        got = step(model.fused, partly, rows, sampling=samples, hidden_out=hidden)
        np.testing.assert_array_equal(got, want[samples])
        again = np.empty_like(got)
        if samples.size:
            model.fused.logits(hidden, again)
        np.testing.assert_array_equal(again, got)
        for one, other in zip(whole.pools + whole.scales, partly.pools + partly.scales, strict=True):
            np.testing.assert_array_equal(one, other)
        done += lengths
    model.fused.close()


@pytest.mark.parametrize(
    ("layout", "kind", "tolerance"),
    [
        (Layout.INT4, SourceKind.Q4_0, 0.006),
        (Layout.INT4, SourceKind.Q4_1, 0.006),
        (Layout.INT4, SourceKind.FLOAT32, 0.08),
        (Layout.INT8, SourceKind.Q8_0, 0.0),
        (Layout.INT8, SourceKind.Q4_0, 0.0),
        (Layout.INT8, SourceKind.Q4_1, 0.01),
        (Layout.INT8, SourceKind.FLOAT16, 0.01),
    ],
)
def test_packed_weights_are_the_files_own_or_close(isa: str, layout: Layout, kind: SourceKind, tolerance: float) -> None:
    model = TinyModel(layout, isa)
    k = model.shape.intermediate
    source, want = encoded(kind, np.random.default_rng(4).standard_normal((96, k)).astype(np.float32))
    model.fused.set_rows("down", source, 0)
    got = np.array([model.fused.unpacked_row("down", n, k, 0) for n in range(96)])
    assert relative_error(got, want) <= tolerance
    model.fused.close()


@pytest.mark.parametrize("kind", [SourceKind.Q4_0, SourceKind.Q4_1])
def test_int4_blocks_beside_much_larger_ones_stay_close(isa: str, kind: SourceKind) -> None:
    """Two blocks have one scale: what the smaller one's weights are off by is little beside the larger one's own rounding."""
    model = TinyModel(Layout.INT4, isa)
    k = model.shape.intermediate
    sizes = np.repeat([1.0, 0.3, 0.02, 1.0, 0.05], k // 5)  # the last block is by itself
    weights = np.random.default_rng(5).standard_normal((96, k)) * sizes
    weights[:32, 32:64] = 0
    source, want = encoded(kind, weights.astype(np.float32))
    model.fused.set_rows("down", source, 0)
    got = np.array([model.fused.unpacked_row("down", n, k, 0) for n in range(96)])
    rounding = np.abs(want - weights).reshape(96, 5, 32).max(-1)
    off = np.abs(got - want).reshape(96, 5, 32).max(-1)
    assert (off[:, :2] <= 0.25 * rounding[:, :1]).all()
    assert (off[:, 2:4] <= 0.25 * rounding[:, 3:4]).all()
    assert (off[:, 4] <= 0.25 * rounding[:, 4]).all()
    model.fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_again_leaves_nothing_of_the_old_weights(isa: str, layout: Layout) -> None:
    model, again = TinyModel(layout, isa), TinyModel(layout, isa)
    arena = new_arena(again.fused)
    arena[:] = model.fused_arena
    model.fused.set_rows("gate_up", Source(np.full((160, 96), 3.0, np.float32), SourceKind.FLOAT32, 160), 1, first_row=160)
    assert not np.array_equal(model.fused_arena, arena)
    for first_row, source in model.sources["gate_up", 1]:
        model.fused.set_rows("gate_up", source, 1, first_row=first_row)
    np.testing.assert_array_equal(model.fused_arena, arena)
    for fused in (model.fused, again.fused):
        fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_hidden_states_are_those_of_the_step(isa: str, layout: Layout) -> None:
    model = TinyModel(layout, isa, tied=False)
    tokens = np.random.default_rng(5).integers(0, 300, 30)
    hidden = np.empty((30, model.shape.hidden), np.float32)
    rows = [Row(tokens, 0, blocks_for(30, 3))]
    want = step(model.fused, TinyCache(KvType.FLOAT32, model.shape), rows, hidden_out=hidden)
    got = np.empty_like(want[7:20])
    model.fused.logits(hidden[7:20], got)
    np.testing.assert_array_equal(got, want[7:20])
    model.fused.close()


@pytest.mark.parametrize("layout", [Layout.INT8, Layout.INT4])
def test_weights_that_are_not_finite_show(isa: str, layout: Layout) -> None:
    model = TinyModel(layout, isa)
    weights = np.ones((96, 160), np.float32)
    weights[5, 7] = np.nan
    model.fused.set_rows("down", Source(weights, SourceKind.FLOAT32, 96), 0)
    hidden = np.empty((3, model.shape.hidden), np.float32)
    step(model.fused, TinyCache(KvType.INT8, model.shape), [Row(np.arange(3), 0, blocks_for(3, 3))], hidden_out=hidden, check_tokens=False)
    assert not np.isfinite(hidden).any()
    model.fused.close()


@pytest.mark.parametrize("kind", [SourceKind.Q4_0, SourceKind.Q4_1, SourceKind.Q8_0, SourceKind.FLOAT16, SourceKind.BFLOAT16, SourceKind.FLOAT32])
def test_every_source_format_is_decoded_as_its_definition_says(kind: SourceKind) -> None:
    """The hash is over the exact bits of the values, so equal hashes mean equal decoding."""
    rng, (rows, k) = np.random.default_rng(6), (70, 96)
    library = load_library(LIBRARY_PATH)
    source, values = encoded(kind, rng.standard_normal((rows, k)).astype(np.float32))
    row_keys, column_keys = (rng.integers(0, 1 << 64, n, dtype=np.uint64) for n in (rows, k))
    with np.errstate(over="ignore"):
        want = int(((values.view(np.uint32).astype(np.uint64) @ column_keys) * row_keys).sum(dtype=np.uint64))
    assert hash_rows(library, source, k, row_keys, column_keys, 2) == want
    order = rng.permutation(rows).astype(np.int32)
    with np.errstate(over="ignore"):
        want = int(((values[order].view(np.uint32).astype(np.uint64) @ column_keys) * row_keys).sum(dtype=np.uint64))
    assert hash_rows(library, replace(source, order=order), k, row_keys, column_keys, 2) == want


def encoded(kind: SourceKind, weights: np.ndarray) -> tuple[Source, np.ndarray]:
    """``weights`` in another format, and the float32 values that the gguf package reads back."""
    rows = weights.shape[0]
    if kind == SourceKind.FLOAT32:
        return Source(weights, kind, rows), weights
    if kind == SourceKind.FLOAT16:
        return Source(weights.astype(np.float16), kind, rows), weights.astype(np.float16).astype(np.float32)
    if kind == SourceKind.BFLOAT16:
        bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
        return Source(bits, kind, rows), (bits.astype(np.uint32) << 16).view(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind.name])
    return Source(raw, kind, rows), np.ascontiguousarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))


def test_wrong_arguments_are_refused(isa: str) -> None:
    model = TinyModel(Layout.INT8, isa)
    weights = Source(np.zeros((96, 160), np.float32), SourceKind.FLOAT32, 96)
    with pytest.raises(FusedError, match="no layer 9"):
        model.fused.set_rows("down", weights, 9)
    with pytest.raises(FusedError, match="outside of the linear's 96"):
        model.fused.set_rows("down", weights, 0, first_row=1)
    with pytest.raises(FusedError, match="has no bias"):
        model.fused.set_bias("down", np.zeros(96, np.float32), 0)
    with pytest.raises(ValueError, match="scales"):
        FusedCache.of(KvType.INT8, 16, [0], [0])
    model.fused.bind(None)
    with pytest.raises(FusedError, match="not bound"):
        model.fused.set_rows("down", weights, 0)
    model.fused.close()
