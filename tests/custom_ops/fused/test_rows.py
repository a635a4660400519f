"""What the fused step does to rows between its GEMMs: quantizing them in tiles, and the gate."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops.fused import FusedModel, FusedShape, KvType, Layout, Packing, Source, SourceKind, load_library
from fastengine.custom_ops.library import LIBRARY_PATH

from .tiny import BLOCK_SIZE, Row, TinyCache, TinyModel, cos_sin, new_arena, step


@pytest.mark.parametrize("layout", [Layout.INT8, Layout.INT4])
@pytest.mark.parametrize("sizes", [{}, {"hidden": 576, "intermediate": 544}])
def test_a_tile_of_any_number_of_rows_has_the_same_bits(isa: str, layout: Layout, sizes: dict[str, int]) -> None:
    """Alone, together, and in tiles that end anywhere: of rows of three blocks, and of eight groups and more."""
    model = TinyModel(layout, isa, num_layers=1, **sizes)
    tokens = np.random.default_rng(1).integers(0, 300, 33)
    blocks = list(range(-(-33 // BLOCK_SIZE)))
    want = step(model.fused, TinyCache(KvType.INT8, model.shape), [Row(tokens, 0, blocks)])
    for count in range(1, 34):
        got = step(model.fused, TinyCache(KvType.INT8, model.shape), [Row(tokens[:count], 0, blocks)])
        np.testing.assert_array_equal(got, want[:count], f"{count} rows")
    model.fused.close()


@pytest.mark.parametrize("layout", [Layout.INT8, Layout.INT4])
def test_rows_beside_some_that_are_not_finite_or_all_zero_have_the_same_bits(isa: str, layout: Layout) -> None:
    model = TinyModel(layout, isa, tied=False)
    rng, width = np.random.default_rng(2), model.shape.hidden
    states = rng.standard_normal((16, width)).astype(np.float32)
    special = {1: np.nan, 4: np.inf, 6: -np.inf, 9: 0.0, 14: np.nan}
    plain = [r for r in range(16) if r not in special]
    want = np.empty((16, model.shape.vocab), np.float32)
    model.fused.logits(states, want)
    for r, value in special.items():
        states[r, :: 1 if value == 0 else 50] = value
    for count in (5, 8, 11, 16):
        got = np.empty((count, model.shape.vocab), np.float32)
        model.fused.logits(states[:count].copy(), got)
        some = [r for r in plain if r < count]
        np.testing.assert_array_equal(got[some], want[some])
        assert count <= 9 or not got[9].any()
    model.fused.close()


def gates_of(isa: str, gates: np.ndarray) -> np.ndarray:
    """What a step makes of ``gates`` [n] whose ups are all one: silu of each, in float32 as it leaves the residual stream."""
    inner, hidden = len(gates), len(gates) + 32
    shape = FusedShape(1, hidden, 1, 1, 32, inner, 8, 0.0, cos_sin(32), tied=True)
    model = FusedModel(load_library(LIBRARY_PATH), shape, Packing(Layout.FLOAT32), 2, isa=isa)
    model.bind(new_arena(model))

    def fill(name: str, weights: np.ndarray, first_row: int = 0) -> None:
        model.set_rows(
            name, Source(weights.astype(np.float32), SourceKind.FLOAT32, len(weights)), -1 if name == "embedding" else 0, first_row=first_row
        )

    # Each token's state is its first feature alone, which the norm makes the square root of `hidden`.
    size = np.sqrt(hidden)
    first = np.zeros((inner, hidden))
    first[:, 0] = 1 / size
    fill("embedding", np.eye(1, hidden).repeat(8, 0))
    fill("qkv", np.zeros((96, hidden)))
    fill("output", np.zeros((hidden, 32)))
    fill("gate_up", first * gates[:, None])
    fill("gate_up", first, inner)
    fill("down", np.eye(hidden, inner, -32))
    for name in ("input_norm", "post_attention_norm"):
        model.set_vector(name, np.ones(hidden, np.float32), 0)
    model.set_vector("final_norm", np.ones(hidden, np.float32), -1)
    found = np.empty((1, hidden), np.float32)
    step(model, TinyCache(KvType.FLOAT32, shape), [Row(np.zeros(1, int), 0, [0])], hidden_out=found, check_tokens=False)
    model.close()
    return found[0, 32:].astype(np.float64) / found[0, 0]


def test_gates_are_as_exact_as_floats_are(isa: str) -> None:
    gates = (
        np.concatenate([np.linspace(-20, 20, 301), np.array([0.0, 1e-30, -1e-30, 1e-4, -1e-4, 30, -30, 60, -60])])
        .astype(np.float32)
        .astype(np.float64)
    )
    want = gates / (1 + np.exp(-gates))
    np.testing.assert_allclose(gates_of(isa, gates), want, rtol=4e-6, atol=0)
    small = np.abs(gates) < 6
    np.testing.assert_allclose(gates_of(isa, gates)[small], want[small], rtol=1e-6, atol=0)


def test_gates_far_from_zero_have_their_limits(isa: str) -> None:
    gates = np.array([80.0, 86.9, 87.1, 89, 126, 128, 1000, 1e9] * 4, np.float32).astype(np.float64)
    np.testing.assert_allclose(gates_of(isa, gates), gates, rtol=1e-6)
    np.testing.assert_allclose(gates_of(isa, -gates), 0.0, atol=1e-27)
