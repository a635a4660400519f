"""Rotary tables: the shape of each way to stretch them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fastengine.model_files.spec import ModelSpec
from fastengine.worker.layers.attention import sliding_window_of_layer
from fastengine.worker.layers.rotary import base_frequencies, cos_sin_table, scaled_frequencies

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_hidden_layers=2,
    hidden_size=512,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
PLAIN = base_frequencies(SPEC.rope_theta, 128)


def scaled(max_position: int = 8192, **scaling: Any) -> tuple[np.ndarray, float]:
    return scaled_frequencies(dataclasses.replace(SPEC, rope_scaling=scaling), 128, max_position)


def test_table_holds_cosines_then_sines() -> None:
    table = cos_sin_table(SPEC, 100)
    assert table.shape == (100, 128)
    assert table.dtype == np.float32
    assert table[37, 5] == pytest.approx(math.cos(37 * PLAIN[5]), abs=1e-6)
    assert table[37, 64 + 5] == pytest.approx(math.sin(37 * PLAIN[5]), abs=1e-6)


def test_partial_rotary_covers_the_first_features() -> None:
    assert cos_sin_table(dataclasses.replace(SPEC, partial_rotary_factor=0.5), 10).shape == (10, 64)


def test_linear() -> None:
    np.testing.assert_allclose(scaled(rope_type="linear", factor=4.0)[0], PLAIN / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    found, factor = scaled(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    waves = 2 * math.pi / PLAIN
    assert factor == 1.0
    np.testing.assert_allclose(found[waves < 8192 / 4], PLAIN[waves < 8192 / 4])
    np.testing.assert_allclose(found[waves > 8192], PLAIN[waves > 8192] / 8)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert (found[between] < PLAIN[between]).all()
    assert (found[between] > PLAIN[between] / 8).all()
    assert (np.diff(found) < 0).all()


def test_yarn_stretches_by_parts_and_warms_attention() -> None:
    found, factor = scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    np.testing.assert_allclose(found[:5], PLAIN[:5])
    np.testing.assert_allclose(found[-5:], PLAIN[-5:] / 4)
    assert (np.diff(found) < 0).all()
    equal_scales = scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, mscale=1.0, mscale_all_dim=1.0)
    assert equal_scales[1] == 1.0


def test_dynamic_depends_on_the_longest_sequence_served() -> None:
    np.testing.assert_allclose(scaled(8192, rope_type="dynamic", factor=2.0)[0], PLAIN)
    longer = scaled(16384, rope_type="dynamic", factor=2.0)[0]
    assert longer[0] == pytest.approx(1.0)
    assert longer[-1] == pytest.approx(PLAIN[-1] / 3.0)


def test_factors_of_a_gguf() -> None:
    factors = np.linspace(1, 8, 64)
    np.testing.assert_allclose(scaled(rope_type="frequency_factors", factors=factors.tolist())[0], PLAIN / factors)
    with pytest.raises(ValueError, match="3 rotary frequency factors, the model needs 64"):
        scaled(rope_type="frequency_factors", factors=[1.0, 1.0, 1.0])


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="'magic' is not supported"):
        scaled(rope_type="magic", factor=2.0)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({}, [0, 0]),
        ({"sliding_window": None}, [0, 0]),
        ({"sliding_window": 64}, [64, 64]),
        ({"sliding_window": 64, "use_sliding_window": False}, [0, 0]),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, [64, 0]),
    ],
)
def test_sliding_windows(extra: dict[str, Any], windows: list[int]) -> None:
    spec = dataclasses.replace(SPEC, extra=extra)
    assert [sliding_window_of_layer(spec, layer) for layer in range(2)] == windows
