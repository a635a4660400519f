"""The cos/sin table of rotary position embeddings (Su et al., 2021), with the usual ways to stretch it.

Conventions: ``dim`` is the number of rotated features, frequency i of ``dim / 2`` is
``theta ** (-2i / dim)``; a table is ``float32[max_position, dim]``, cosines in its first half and
sines in its second. Plain layers, the fused step and the GPU all read this one table; whether a pair is
(i, i + dim / 2) or (2i, 2i + 1) is theirs.

What depends on the length of a sequence (dynamic, longrope) follows from the longest one served instead: fixed, so
that cached KV stays valid as a sequence grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastengine.model_files.spec import ModelSpec


def cos_sin_table(spec: ModelSpec, max_position: int) -> np.ndarray:
    """The model's table for positions ``[0, max_position)``. Raises ValueError naming a scaling that it can't build."""
    frequencies, attention_factor = scaled_frequencies(spec, rotary_dim(spec), max_position)
    angles = np.arange(max_position, dtype=np.float64)[:, None] * frequencies[None, :]
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * attention_factor).astype(np.float32)


def rotary_dim(spec: ModelSpec) -> int:
    """Rotated features of a head. Raises ValueError if that is no even number of at least 2."""
    # The factor may be a quotient that is a hair too small.
    dim = int(spec.head_dim * spec.partial_rotary_factor + 1e-6)
    if dim < 2 or dim % 2:
        raise ValueError(f"partial_rotary_factor {spec.partial_rotary_factor:g} of a head of {spec.head_dim} is no even number of features")
    return dim


def base_frequencies(theta: float, dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def scaled_frequencies(spec: ModelSpec, dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Frequencies under ``spec.rope_scaling`` and the factor on cosines and sines."""
    kinds = spec.extra.get("rope_parameters")
    if kinds is not None:
        raise ValueError(f"rotary embeddings that differ between kinds of layers ({', '.join(sorted(kinds))}) are not supported")
    scaling = spec.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    builder = BUILDERS.get(kind)
    if builder is None:
        raise ValueError(f"rope scaling type {kind!r} is not supported; known are {', '.join(BUILDERS)}")
    return builder(_Scaling(kind, scaling, spec, dim, max_position))


class _Scaling:
    """What the ways to stretch a table read: the checkpoint's own dictionary, checked, and the model's sizes."""

    def __init__(self, kind: str, values: Mapping[str, Any], spec: ModelSpec, dim: int, max_position: int):
        self.kind, self.values, self.spec, self.dim, self.max_position = kind, values, spec, dim, max_position
        self.plain = base_frequencies(spec.rope_theta, dim)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises ValueError naming it."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"rope scaling {self.kind!r} needs a number above 0 as {key!r}, got {value!r}")
        return float(value)

    def factors(self, key: str) -> np.ndarray:
        """One divisor for each frequency."""
        found = np.asarray(self.values.get(key, ()), dtype=np.float64)
        if found.shape != self.plain.shape or not (np.isfinite(found) & (found > 0)).all():
            raise ValueError(
                f"rope scaling {self.kind!r}: {key} has {found.size} rotary frequency factors, the model needs {self.plain.size} above 0"
            )
        return found

    @property
    def original(self) -> float:
        """Positions that the model was trained with before it was stretched."""
        # Phi-3 has it beside the dictionary.
        beside = self.spec.extra.get("original_max_position_embeddings", self.spec.max_position_embeddings)
        return self.number("original_max_position_embeddings", float(beside))

    @property
    def serves_long(self) -> bool:
        return self.max_position > self.original


def _default(s: _Scaling) -> tuple[np.ndarray, float]:
    return s.plain, 1.0


def _linear(s: _Scaling) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al., 2023)."""
    return s.plain / s.number("factor"), 1.0


def _dynamic(s: _Scaling) -> tuple[np.ndarray, float]:
    """NTK-aware theta: for the longest sequence served, or by a fixed ``alpha`` (Hunyuan)."""
    if s.values.get("alpha") is not None:
        stretch = s.number("alpha")
    else:
        factor, length = s.number("factor"), max(s.max_position, s.original)
        stretch = factor * length / s.original - (factor - 1)
    return base_frequencies(s.spec.rope_theta * stretch ** (s.dim / max(s.dim - 2, 1)), s.dim), 1.0


def _llama3(s: _Scaling) -> tuple[np.ndarray, float]:
    """Long waves are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    original = s.number("original_max_position_embeddings")
    low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
    if high <= low:
        raise ValueError(f"rope scaling 'llama3': high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    wavelengths = 2 * math.pi / s.plain
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * s.plain / s.number("factor") + blend * s.plain, 1.0


def _yarn(s: _Scaling) -> tuple[np.ndarray, float]:
    """Interpolation by parts (Peng et al., 2023, YaRN) and its attention temperature."""

    def dimension_with(rotations: float) -> float:
        return s.dim * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(s.spec.rope_theta))

    first, last = dimension_with(s.number("beta_fast", 32)), dimension_with(s.number("beta_slow", 1))
    if s.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, s.dim - 1)
    interpolated = np.clip((np.arange(s.dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    stretched = interpolated * s.plain / s.number("factor") + (1 - interpolated) * s.plain
    return stretched, _yarn_attention_factor(s)


def _yarn_attention_factor(s: _Scaling) -> float:
    if s.values.get("attention_factor") is not None:
        return s.number("attention_factor")
    factor = s.number("factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if s.values.get("mscale") and s.values.get("mscale_all_dim"):
        return magnitude(s.number("mscale")) / magnitude(s.number("mscale_all_dim"))
    return magnitude(1.0)


def _longrope(s: _Scaling) -> tuple[np.ndarray, float]:
    """A divisor found for each frequency (Ding et al., 2024, LongRoPE): one set up to the original length, another beyond."""
    which = "long" if s.serves_long else "short"
    frequencies = s.plain / s.factors(f"{which}_factor")
    for key in ("attention_factor", f"{which}_mscale"):
        if s.values.get(key) is not None:
            return frequencies, s.number(key)
    # By how much the checkpoint was stretched, whatever length is served.
    ratio = s.spec.max_position_embeddings / s.original
    factor = s.number("factor", ratio) if ratio == 1 else ratio
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(s.original)) if factor > 1 else 1.0


def _frequency_factors(s: _Scaling) -> tuple[np.ndarray, float]:
    """A GGUF's own divisors."""
    return s.plain / s.factors("factors"), 1.0


def _mrope(s: _Scaling) -> tuple[np.ndarray, float]:
    """Of text all axes have the same position: the plain table. Images take its rows apart (:func:`rows_of_axes`)."""
    frequency_axes(s.spec, s.dim)
    return s.plain, 1.0


Builder = Callable[[_Scaling], tuple[np.ndarray, float]]
BUILDERS: dict[str, Builder] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi-3 checkpoints
    "mrope": _mrope,
    "frequency_factors": _frequency_factors,
}

# ---- positions with several axes (time, height, width) ----------------------------------------------


def frequency_axes(spec: ModelSpec, dim: int) -> np.ndarray:
    """Which axis of a position turns each frequency: ``int[dim / 2]``, 0 time, 1 height, 2 width; zeros for models of text.

    ``mrope_section`` has the number of each axis's frequencies: one axis after the other (Qwen2-VL), or, with
    ``mrope_interleaved``, in turns as far as an axis has any (Qwen3-VL). With ``rope_3d`` (ERNIE 4.5 VL) the last
    ``freq_allocation`` frequencies are time's and the others height's and width's in turns.

    Raises ValueError for sections that are not those of ``dim / 2`` frequencies.
    """
    axes, scaling = np.zeros(dim // 2, dtype=np.int64), spec.rope_scaling or {}
    if spec.extra.get("rope_3d"):
        of_time = spec.extra.get("freq_allocation")
        if not isinstance(of_time, int) or not 0 <= of_time <= axes.size:
            raise ValueError(f"freq_allocation: expected 0 to {axes.size}, got {of_time!r}")
        axes[: axes.size - of_time] = 1 + np.arange(axes.size - of_time) % 2
        return axes
    sections: Sequence[int] | None = scaling.get("mrope_section")
    if sections is None:
        return axes
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != axes.size:
        raise ValueError(f"mrope_section {sections} does not share out {axes.size} frequencies among three axes")
    if not scaling.get("mrope_interleaved"):
        return np.repeat(np.arange(3), sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rows_of_axes(table: np.ndarray, axes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A table with one row for each token, for tokens whose axes have positions of their own: ``float32[T, dim]``.

    table of :func:`cos_sin_table`; axes of :func:`frequency_axes`; positions ``int[3, T]``, rows of the table. The
    operators take it with positions ``0 .. T - 1``.
    """
    columns = np.concatenate([axes, axes])
    return np.ascontiguousarray(table[positions[columns].T, np.arange(table.shape[1])])
