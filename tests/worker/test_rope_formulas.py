"""Every kind of rotary embedding against its paper's formula, written here number by number: the table, and what models compute with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fastengine import custom_ops
from fastengine.model_files import load_spec
from fastengine.model_files.spec import ModelSpec
from fastengine.protocol.requests import SamplingParams
from fastengine.worker.layers.rotary import BUILDERS, cos_sin_table, frequency_axes, rotary_dim, rows_of_axes

from .conftest import driver_of, loaded_host
from .driver import Request
from .models import hf_config, random_weights, write_model

THETA, HEAD, TRAINED = 10000.0, 32, 64
# (dim, i) -> one frequency, float64
Frequency = Callable[[int, int], float]


def plain(dim: int, i: int) -> float:
    return 1.0 / THETA ** (2 * i / dim)


def ntk(stretch: float) -> Frequency:
    return lambda dim, i: 1.0 / (THETA * stretch ** (dim / (dim - 2))) ** (2 * i / dim)


def llama3(dim: int, i: int) -> float:
    """Factor 8, low 1, high 4, from 64 positions: by the wavelength against 64 / 1 and 64 / 4."""
    frequency = plain(dim, i)
    wavelength = 2 * math.pi / frequency
    if wavelength < TRAINED / 4:
        return frequency
    if wavelength > TRAINED / 1:
        return frequency / 8
    smooth = (TRAINED / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def yarn(dim: int, i: int) -> float:
    """Factor 4 from 64 positions; alpha 1, beta 32 rotations give the ramp's ends, rounded outwards (YaRN, eq. 18-20)."""
    ends = [dim * math.log(TRAINED / (rotations * 2 * math.pi)) / (2 * math.log(THETA)) for rotations in (32, 1)]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    keep = 1 - min(max((i - low) / (high - low), 0.0), 1.0)
    return plain(dim, i) / 4 * (1 - keep) + plain(dim, i) * keep


SHORT = [1.0 + 0.1 * i for i in range(HEAD // 2)]
LONG = [2.0 + 0.5 * i for i in range(HEAD // 2)]


def divided_by(factors: list[float]) -> Frequency:
    return lambda dim, i: plain(dim, i) / factors[i]


YARN_WARMTH = 0.1 * math.log(4) + 1
# 256 positions, stretched from 64: sqrt(1 + ln 4 / ln 64).
LONG_WARMTH = math.sqrt(1 + math.log(4) / math.log(64))
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
# name -> config.json's rope_scaling, positions served, frequency, factor on cosines and sines
KINDS: dict[str, tuple[dict[str, Any], int, Frequency, float]] = {
    "default": ({"rope_type": "default"}, 256, plain, 1.0),
    "linear": ({"type": "linear", "factor": 4.0}, 256, lambda dim, i: plain(dim, i) / 4, 1.0),
    "dynamic": ({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED}, 256, ntk(2 * 256 / TRAINED - 1), 1.0),
    "dynamic within": ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED}, 48, plain, 1.0),
    "dynamic alpha": ({"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, 256, ntk(1000.0), 1.0),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED},
        256,
        llama3,
        1.0,
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}, 256, yarn, YARN_WARMTH),
    "yarn mscale": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "mscale": 0.5, "mscale_all_dim": 1.0},
        256,
        yarn,
        (0.05 * math.log(4) + 1) / YARN_WARMTH,
    ),
    "longrope": ({**LONGROPE, "original_max_position_embeddings": TRAINED}, 256, divided_by(LONG), LONG_WARMTH),
    "longrope within": ({**LONGROPE, "original_max_position_embeddings": TRAINED}, TRAINED, divided_by(SHORT), LONG_WARMTH),
    "longrope by factor": ({**LONGROPE, "factor": 16.0}, 200, divided_by(SHORT), math.sqrt(1 + math.log(16) / math.log(256))),
    "longrope stated": ({**LONGROPE, "original_max_position_embeddings": TRAINED, "attention_factor": 1.25}, 256, divided_by(LONG), 1.25),
    "su": (
        {**LONGROPE, "type": "su", "rope_type": "su", "original_max_position_embeddings": TRAINED, "long_mscale": 1.5},
        256,
        divided_by(LONG),
        1.5,
    ),
    "mrope": ({"type": "mrope", "mrope_section": [4, 6, 6]}, 256, plain, 1.0),
    "frequency_factors": ({"rope_type": "frequency_factors", "factors": LONG}, 256, divided_by(LONG), 1.0),
}


def spec_with(tmp_path: Path, scaling: dict[str, Any], **changes: Any) -> ModelSpec:
    config = hf_config(head_dim=HEAD, rope_scaling=scaling, max_position_embeddings=256, **changes)
    return load_spec(write_model(tmp_path / "spec", config, {}))


def expected_table(positions: int, dim: int, frequency: Frequency, warmth: float) -> np.ndarray:
    angles = [[p * frequency(dim, i) for i in range(dim // 2)] for p in range(positions)]
    return np.array([[warmth * f(angle) for f in (math.cos, math.sin) for angle in row] for row in angles])


@pytest.mark.parametrize("name", KINDS)
def test_table(name: str, tmp_path: Path) -> None:
    scaling, positions, frequency, warmth = KINDS[name]
    table = cos_sin_table(spec_with(tmp_path, scaling), positions)
    np.testing.assert_allclose(table, expected_table(positions, HEAD, frequency, warmth), rtol=0, atol=2e-7)


def test_there_is_a_formula_for_every_kind() -> None:
    assert {scaling.get("rope_type", scaling.get("type")) for scaling, *_ in KINDS.values()} == set(BUILDERS)


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "dynamic alpha", "llama3", "yarn", "mrope"])
def test_partial_tables_follow_from_the_rotated_features_alone(name: str, tmp_path: Path) -> None:
    scaling, positions, frequency, warmth = KINDS[name]
    if name == "mrope":
        scaling = {**scaling, "mrope_section": [2, 3, 3]}
    table = cos_sin_table(spec_with(tmp_path, scaling, partial_rotary_factor=0.5), positions)
    np.testing.assert_allclose(table, expected_table(positions, HEAD // 2, frequency, warmth), rtol=0, atol=2e-7)


def test_phi_3_has_the_original_length_beside_the_dictionary(tmp_path: Path) -> None:
    table = cos_sin_table(spec_with(tmp_path, LONGROPE, original_max_position_embeddings=TRAINED), 256)
    np.testing.assert_allclose(table, expected_table(256, HEAD, divided_by(LONG), LONG_WARMTH), rtol=0, atol=2e-7)


def test_the_number_of_rotated_features() -> None:
    def dim_of(head: int, factor: float) -> int:
        return rotary_dim(ModelSpec("", "", 1, 8, 8, 1, 1, head, 8, 8, 1e-6, THETA, partial_rotary_factor=factor))

    assert [dim_of(128, 1.0), dim_of(96, 64 / 96), dim_of(80, 0.4), dim_of(112, 110 / 112), dim_of(64, 0.25)] == [128, 64, 32, 110, 16]
    for head, factor in ((64, 0.015), (48, 0.0209), (6, 0.5)):
        with pytest.raises(ValueError, match=f"of a head of {head} is no even number"):
            dim_of(head, factor)


@pytest.mark.parametrize(
    ("scaling", "complaint"),
    [
        ({"type": "linear"}, "'linear' needs a number above 0 as 'factor', got None"),
        ({"type": "dynamic", "factor": -2.0}, "'dynamic' needs a number above 0 as 'factor', got -2.0"),
        ({"rope_type": "yarn", "factor": "4"}, "'yarn' needs a number above 0 as 'factor', got '4'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs a number above 0 as 'original_max_position_embeddings'"),
        ({**KINDS["llama3"][0], "high_freq_factor": 1.0}, "high_freq_factor 1 must be above low_freq_factor 1"),
        ({**LONGROPE, "short_factor": [1.0]}, "short_factor has 1 rotary frequency factors, the model needs 16 above 0"),
        ({**LONGROPE, "short_factor": [0.0] * 16}, "short_factor has 16 rotary frequency factors, the model needs 16 above 0"),
        ({"type": "mrope", "mrope_section": [4, 4, 4]}, r"mrope_section \[4, 4, 4\] does not share out 16 frequencies"),
        ({"rope_type": "proportional"}, "'proportional' is not supported; known are default, linear"),
    ],
)
def test_what_can_not_be_built_is_refused_by_name(scaling: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        cos_sin_table(spec_with(tmp_path, scaling), 128)


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    spec = load_spec(write_model(tmp_path / "differ", hf_config(rope_parameters=kinds), {}))
    with pytest.raises(ValueError, match=r"differ between kinds of layers \(full_attention, sliding_attention\)"):
        cos_sin_table(spec, 16)
    same = {"full_attention": kinds["full_attention"], "sliding_attention": kinds["full_attention"]}
    spec = load_spec(write_model(tmp_path / "same", hf_config(rope_parameters=same), {}))
    assert (cos_sin_table(spec, 16).shape, spec.rope_theta) == ((16, 16), 1e6)


# ---- positions with several axes ---------------------------------------------------------------------

AXES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str]] = {
    "one after the other": ({"rope_type": "default", "mrope_section": [4, 6, 6]}, {}, False, "tttthhhhhhwwwwww"),
    "in turns": ({"rope_type": "default", "mrope_section": [8, 5, 3], "mrope_interleaved": True}, {}, False, "thwthwthwthtthtt"),
    "ernie": ({"rope_type": "default", "mrope_section": [5, 5, 6]}, {"rope_3d": True, "freq_allocation": 6}, True, "hwhwhwhwhwtttttt"),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_of_the_frequencies(name: str, tmp_path: Path) -> None:
    scaling, extra, _, letters = AXES[name]
    assert "".join("thw"[axis] for axis in frequency_axes(spec_with(tmp_path, scaling, **extra), HEAD)) == letters
    assert frequency_axes(spec_with(tmp_path, {"rope_type": "default"}), HEAD).tolist() == [0] * 16


@pytest.mark.parametrize("allocation", [None, -1, 17])
def test_an_allocation_that_does_not_fit_is_refused(allocation: int | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="freq_allocation: expected 0 to 16"):
        frequency_axes(spec_with(tmp_path, {}, rope_3d=True, freq_allocation=allocation), HEAD)


@pytest.mark.parametrize("name", AXES)
def test_the_operator_turns_each_pair_by_its_axis(name: str, tmp_path: Path) -> None:
    """Through the operator itself: rows made for each token, positions counting them."""
    scaling, extra, interleaved, letters = AXES[name]
    rng, tokens = np.random.default_rng(7), 9
    positions = rng.integers(0, 200, (3, tokens))
    spec = spec_with(tmp_path, scaling, **extra)
    rows = rows_of_axes(cos_sin_table(spec, 200), frequency_axes(spec, HEAD), positions)
    heads = rng.normal(size=(tokens, 2, HEAD))
    query, key, value = (paddle.to_tensor(heads.astype(np.float32)) for _ in range(3))
    caches = [paddle.zeros([1, 2, 16, HEAD]) for _ in range(2)]
    counted = paddle.arange(tokens, dtype="int32")
    custom_ops.rotary_write_kv(query, key, value, counted, paddle.to_tensor(rows), counted, caches[0], caches[1], interleaved)
    for t in range(tokens):
        for i, letter in enumerate(letters):
            angle = positions["thw".index(letter), t] * plain(HEAD, i)
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + HEAD // 2)
            x, y = heads[t, :, first], heads[t, :, second]
            turned = (x * math.cos(angle) - y * math.sin(angle), y * math.cos(angle) + x * math.sin(angle))
            for place, expected in zip((first, second), turned, strict=True):
                np.testing.assert_allclose(query.numpy()[t, :, place], expected, atol=1e-5)
                np.testing.assert_allclose(caches[0].numpy()[0, :, t, place], expected, atol=1e-5)


def test_tokens_of_text_have_the_plain_rows(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, AXES["in turns"][0])
    table, positions = cos_sin_table(spec, 50), np.array([3, 49, 0])
    np.testing.assert_array_equal(rows_of_axes(table, frequency_axes(spec, HEAD), np.stack([positions] * 3)), table[positions])


# ---- whole models ------------------------------------------------------------------------------------


def logprobs_of(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int], frequency: Frequency, warmth: float) -> np.ndarray:
    """Of each token after the first, by a Llama in float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    cos, sin = np.split(expected_table(len(tokens), dim, frequency, warmth)[:, None], 2, axis=2)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)

    x = w["model.embed_tokens.weight"][tokens]
    visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = ((y @ w[f"{name}.self_attn.{n}_proj.weight"].T).reshape(len(tokens), -1, dim) for n in "qkv")
        q, k = turned(q), turned(k).repeat(heads // kv_heads, axis=1)
        scores = np.where(visible, np.einsum("qhd,khd->hqk", q, k) * dim**-0.5, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        seen = np.einsum("hqk,khd->qhd", shares, v.repeat(heads // kv_heads, axis=1)).reshape(len(tokens), -1)
        x = x + seen @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = y @ w[f"{name}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
    logits = norm(x, "model.norm") @ w["lm_head.weight"].T
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.array([logits[i, token] for i, token in enumerate(tokens[1:])])


@pytest.mark.parametrize("name", ["dynamic", "llama3", "yarn", "longrope", "mrope"])
def test_models_turn_by_it_in_plain_layers_and_in_the_fused_step(name: str, tmp_path: Path) -> None:
    scaling, positions, frequency, warmth = KINDS[name]
    config = hf_config(head_dim=HEAD, rope_scaling=scaling)
    weights, tokens = random_weights(config), np.random.default_rng(2).integers(3, 128, 90).tolist()
    path = write_model(tmp_path / "model", config, weights)
    expected, without = (logprobs_of(config, weights, tokens, *way) for way in ((frequency, warmth), (plain, 1.0)))
    for quantization, share in (("none", 1e-3), ("wint8", 0.2)):
        host = loaded_host(path, quantization=quantization, kv_cache_dtype="float32", block_size=16, max_model_len=positions)
        sampling = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
        (request,) = driver_of(host).run([Request(tokens, 1, sampling)], chunk_size=lambda: 31)
        found = np.array([entry.logprob for entry in request.prompt_logprobs])
        assert np.sqrt(((found - expected) ** 2).mean()) < share * expected.std()
        if name != "mrope":
            assert np.sqrt(((found - without) ** 2).mean()) > 2 * share * expected.std()
