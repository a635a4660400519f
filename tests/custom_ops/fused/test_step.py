"""The fused step against the formulas, and against itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops.fused import FusedCache, FusedError, KvType, Layout, Source, SourceKind

from .tiny import BLOCK_SIZE, Row, TinyCache, TinyModel, step

LAYOUTS = list(Layout)
KV_TYPES = list(KvType)
# Relative to the logits' standard deviation: what eight bits, or a bfloat16 cache, may cost.
TOLERANCE = {Layout.FLOAT32: 2e-4, Layout.INT8: 0.12, Layout.INT4: 0.15}
KV_TOLERANCE = {KvType.FLOAT32: 0.0, KvType.BFLOAT16: 0.03, KvType.INT8: 0.06}


def blocks_for(length: int, first: int) -> list[int]:
    return list(range(first, first + -(-length // BLOCK_SIZE)))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(((got - want) ** 2).mean()) / want.std())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_prefill_equals_the_formulas(isa: str, layout: Layout, kv_type: KvType) -> None:
    model = TinyModel(layout, isa_argument(isa))
    tokens = np.random.default_rng(1).integers(0, 300, 150)
    got = step(model.fused, TinyCache(kv_type, model.shape), [Row(tokens, 0, blocks_for(150, 3))])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[layout] + KV_TOLERANCE[kv_type]
    model.fused.close()


@pytest.mark.parametrize("variant", [{"bias": True}, {"qk_norm": True}, {"interleaved": True}, {"tied": False}])
def test_family_variants_equal_the_formulas(isa: str, variant: dict[str, bool]) -> None:
    model = TinyModel(Layout.FLOAT32, isa_argument(isa), **variant)
    tokens = np.random.default_rng(2).integers(0, 300, 40)
    got = step(model.fused, TinyCache(KvType.FLOAT32, model.shape), [Row(tokens, 0, blocks_for(40, 0))])
    assert relative_error(got, model.logits(tokens)) < TOLERANCE[Layout.FLOAT32]
    model.fused.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_row_is_bit_identical_in_any_batch(isa: str, layout: Layout, kv_type: KvType) -> None:
    """One sequence whole, in chunks, and token by token amid changing company; also with one thread."""
    model = TinyModel(layout, isa_argument(isa))
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


def test_the_four_bit_layout_stays_close_to_the_file(isa: str) -> None:
    model = TinyModel(Layout.INT4, isa_argument(isa))
    want = model.weights["down", 1]
    got = np.array([model.fused.unpacked_row("down", n, want.shape[1], 1) for n in range(want.shape[0])])
    assert relative_error(got, want) < 0.02
    model.fused.close()


def test_wrong_arguments_are_refused(isa: str) -> None:
    model = TinyModel(Layout.FLOAT32, isa_argument(isa))
    weights = Source(np.zeros((96, 160), np.float32), SourceKind.FLOAT32, 96)
    with pytest.raises(FusedError, match="Q4_0 and Q4_1"):
        model.fused.set_linear("down", [weights], 160, Layout.INT4, 0)
    with pytest.raises(FusedError, match="no layer 9"):
        model.fused.set_linear("down", [weights], 160, Layout.INT8, 9)
    with pytest.raises(FusedError, match="multiples of 32"):
        model.fused.set_linear("down", [weights], 160, Layout.INT8, 0, group=48)
    with pytest.raises(ValueError, match="scales"):
        FusedCache.of(KvType.INT8, 16, [0], [0])
    model.fused.close()


def isa_argument(isa: str) -> str:
    return "best" if isa == "avx512" else isa
