"""How the fused step draws tokens: the C form of a batch's sampling parameters.

Everything between logits and tokens is part of the step's one call: penalties, biases, masks, the draw and
log-probabilities. A row's result depends on its own logits and parameters alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Draw(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", "token_ids")),
        *((name, _INTEGER) for name in ("num_rows", "vocab_size")),
    ]


class _Adjust(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("logits", "repetition", "presence", "frequency", "token_ids", "row_starts", "row_ends", "output_starts")),
        *((name, _POINTER) for name in ("bias_ids", "bias_values", "bias_starts")),
        *((name, _INTEGER) for name in ("num_rows", "vocab_size")),
    ]


class _Logprobs(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("logits", "token_ids")),
        ("k", _INTEGER),
        *((name, _POINTER) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")),
        *((name, _INTEGER) for name in ("num_rows", "vocab_size")),
    ]


class _RowSampling(ctypes.Structure):
    _fields_ = [
        ("draw", _Draw),
        ("adjust", _Adjust),
        *((name, _POINTER) for name in ("allowed", "mask_of")),
        ("logprobs", _Logprobs),
        ("wanted", _POINTER),
        ("from_processed", _INTEGER),
    ]


@dataclass(frozen=True)
class Draws:
    """As in ``custom_ops.sample``: float32 ``temperature, top_p, min_p``, int32 ``top_k, positions``, int64 ``seeds``, all ``[R]``."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Adjustments:
    """As in ``custom_ops.apply_penalties``, but the tokens of row r are ``token_ids[row_starts[r] : row_ends[r]]`` of any int32 array."""

    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    token_ids: np.ndarray
    row_starts: np.ndarray
    row_ends: np.ndarray
    output_starts: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    bias_starts: np.ndarray


@dataclass(frozen=True)
class TokenMasks:
    """``allowed`` bool ``[n, vocab]``; ``mask_of`` int32 ``[R]``: each row's entry there, or -1."""

    allowed: np.ndarray
    mask_of: np.ndarray


class RowLogprobs:
    """Where log-probabilities go, as ``custom_ops.log_softmax_gather`` returns them.

    ``wanted`` int32 ``[R]``: negative for rows that want none, else how many beside the drawn token; what the others'
    entries hold means nothing. ``from_processed``: of what is drawn from, instead of the raw logits.
    """

    def __init__(self, wanted: np.ndarray, *, from_processed: bool):
        self.wanted = wanted
        self.from_processed = from_processed
        self.k = max(0, int(wanted.max(initial=0)))
        self.logprobs = np.empty(wanted.size, np.float32)
        self.ranks = np.empty(wanted.size, np.int32)
        self.top_ids = np.empty((wanted.size, self.k), np.int32)
        self.top_logprobs = np.empty((wanted.size, self.k), np.float32)


class RowSampling:
    """The parameters of R rows. Arrays are contiguous and of the dtypes named; no value is checked."""

    def __init__(self, draws: Draws, adjustments: Adjustments | None = None, masks: TokenMasks | None = None, logprobs: RowLogprobs | None = None):
        self.logprobs = logprobs
        self._arrays = (draws, adjustments, masks, logprobs)  # alive as long as their addresses are in use
        raw = _RowSampling()
        raw.draw = _Draw(None, *_addresses(draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.seeds, draws.positions))
        if adjustments is not None:
            a = adjustments
            raw.adjust = _Adjust(
                None, *_addresses(a.repetition, a.presence, a.frequency, a.token_ids, a.row_starts, a.row_ends, a.output_starts),
                *_addresses(a.bias_ids, a.bias_values, a.bias_starts),
            )  # fmt: skip
        if masks is not None:
            raw.allowed, raw.mask_of = _addresses(masks.allowed, masks.mask_of)
        if logprobs is not None:
            outputs = _addresses(logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs)
            raw.logprobs = _Logprobs(None, None, logprobs.k, *outputs)
            (raw.wanted,) = _addresses(logprobs.wanted)
            raw.from_processed = logprobs.from_processed
        self._raw = raw

    @property
    def address(self) -> int:
        return ctypes.addressof(self._raw)


def _addresses(*arrays: np.ndarray) -> list[int]:
    return [array.ctypes.data for array in arrays]
