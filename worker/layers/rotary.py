"""The cos/sin table of rotary position embeddings (Su et al., 2021), with the usual ways to stretch it.

Conventions: ``dim`` is the number of rotated features, frequency i of ``dim / 2`` is
``theta ** (-2i / dim)``; a table is ``float32[max_position, dim]``, cosines in its first half and
sines in its second.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastengine.model_files.spec import ModelSpec

SUPPORTED = "default, linear, dynamic, llama3, yarn, frequency_factors"


def cos_sin_table(spec: ModelSpec, max_position: int) -> np.ndarray:
    """The model's table for positions ``[0, max_position)``. Raises ValueError for an unknown scaling type."""
    dim = int(spec.head_dim * spec.partial_rotary_factor)
    frequencies, attention_factor = scaled_frequencies(spec, dim, max_position)
    angles = np.arange(max_position, dtype=np.float64)[:, None] * frequencies[None, :]
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * attention_factor).astype(np.float32)


def base_frequencies(theta: float, dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def scaled_frequencies(spec: ModelSpec, dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Frequencies under ``spec.rope_scaling`` and the factor on cosines and sines."""
    scaling = spec.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    frequencies = base_frequencies(spec.rope_theta, dim)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "dynamic":
        return base_frequencies(_dynamic_theta(spec, scaling, dim, max_position), dim), 1.0
    if kind == "frequency_factors":
        factors = np.asarray(scaling["factors"], dtype=np.float64)
        if factors.shape != frequencies.shape:
            raise ValueError(f"the checkpoint has {factors.size} rotary frequency factors, the model needs {frequencies.size}")
        return frequencies / factors, 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, scaling, spec, dim)
    raise ValueError(f"rope scaling type {kind!r} is not supported; known are {SUPPORTED}")


def _dynamic_theta(spec: ModelSpec, scaling: dict[str, Any], dim: int, max_position: int) -> float:
    """NTK-aware theta for the longest sequence served: fixed, so that cached KV stays valid as a sequence grows."""
    original = scaling.get("original_max_position_embeddings", spec.max_position_embeddings)
    length = max(max_position, original)
    stretch = scaling["factor"] * length / original - (scaling["factor"] - 1)
    return float(spec.rope_theta * stretch ** (dim / (dim - 2)))


def _llama3(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Long waves are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


def _yarn(frequencies: np.ndarray, scaling: dict[str, Any], spec: ModelSpec, dim: int) -> tuple[np.ndarray, float]:
    """Interpolation by parts (Peng et al., 2023, YaRN) and its attention temperature."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings", spec.max_position_embeddings)

    def dimension_with(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    first, last = dimension_with(scaling.get("beta_fast", 32)), dimension_with(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    interpolated = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    stretched = interpolated * frequencies / factor + (1 - interpolated) * frequencies
    return stretched, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
