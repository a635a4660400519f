"""One set of rules for sampling values: every front end checks by it what a user sent, the worker what it is to follow.

The workers compute in float32 and int32: a value that is fine in Python may be 0, infinite or too large there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from fastengine.protocol.requests import SamplingParams

_MASK = 2**64 - 1
SEED_MASK = 2**63 - 1

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 2048
# What one request's sampling may take of the message that starts it: grammar, bias, stop tokens and the rest together.
MAX_SAMPLING_BYTES = 1 << 20
# msgpack: at most 5 bytes for a token id, 9 for a float, 5 before each string or list, and all plain fields together.
_ID_BYTES, _FLOAT_BYTES, _HEAD_BYTES, _PLAIN_BYTES = 5, 9, 5, 512

# Lowest and highest value of every number. All of them, and what is computed of them, are finite in float32.
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, INT32),
    "min_tokens": (0, INT32),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (-1, INT32),
    "min_p": (0.0, 1.0),
    "seed": (-INT64 - 1, INT64),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-1e3, 1e3),  # over HTTP this and the next are -2 to 2
    "frequency_penalty": (-1e3, 1e3),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
BIAS_RANGE = (-1e6, 1e6)  # over HTTP it is -100 to 100, as in OpenAI's API
_PLACE = re.compile(r" - at `(?:key` in `)?\$?(.*)`$", re.DOTALL)
_TYPES = {f.name: f.type for f in msgspec.structs.fields(SamplingParams)}


class SamplingError(ValueError):
    """A sampling value that can't be followed; ``field`` is its name in SamplingParams."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise SamplingError for the first value of ``params`` that has the wrong type or is out of its range."""
    given = _checked_types(params)  # of fields that are not at their defaults
    for name in given.keys() & RANGES.keys():
        _check_range(name, given[name])
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise SamplingError("min_tokens", f"{params.min_tokens} is more than max_tokens ({params.max_tokens})")
    if "stop" in given:
        _check_stop(params.stop)
    if "stop_token_ids" in given:
        _check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS, "tokens")
        _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if "bad_words_token_ids" in given:
        _check_count("bad_words_token_ids", params.bad_words_token_ids, MAX_BAD_WORDS, "words")
        for word in params.bad_words_token_ids:
            _check_token_ids("bad_words_token_ids", word, vocab_size)
    if "logit_bias" in given:
        _check_token_ids("logit_bias", params.logit_bias, vocab_size)
        _check_bias(params.logit_bias)
    if params.grammar is not None:
        _check_text("grammar", params.grammar.source)
    size = sampling_bytes(params)
    if size > MAX_SAMPLING_BYTES:
        raise SamplingError(largest_field(params), f"the request's sampling settings take {size} bytes; {MAX_SAMPLING_BYTES} are allowed")
    if params.reasoning is not None:
        marks = (params.reasoning.begin_token_id, params.reasoning.end_token_id)
        _check_token_ids("reasoning", (mark for mark in marks if mark is not None), vocab_size)
        if not 0 <= (params.reasoning.max_tokens or 0) <= INT32:
            raise SamplingError("reasoning", f"max_tokens must be between 0 and {INT32}, got {params.reasoning.max_tokens}")


def is_plain(params: SamplingParams) -> bool:
    """Whether each token needs nothing but its own distribution: no rules, no penalties, no grammar, no log-probabilities."""
    adjusted = params.logit_bias or params.min_tokens or params.bad_words_token_ids or params.grammar or params.reasoning
    penalized = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return not (adjusted or penalized or params.logprobs is not None)


def sampling_bytes(params: SamplingParams) -> int:
    """Most bytes that checked ``params`` take in a message."""
    if not (params.logit_bias or params.bad_words_token_ids or params.stop_token_ids or params.stop or params.grammar):
        return _PLAIN_BYTES  # as most are
    return _PLAIN_BYTES + sum(_field_bytes(params).values())


def _field_bytes(params: SamplingParams) -> dict[str, int]:
    words = params.bad_words_token_ids
    return {
        "logit_bias": len(params.logit_bias) * (_ID_BYTES + _FLOAT_BYTES),
        "bad_words_token_ids": sum(_HEAD_BYTES + _ID_BYTES * len(word) for word in words) if words else 0,
        "stop_token_ids": len(params.stop_token_ids) * _ID_BYTES,
        "stop": sum(_HEAD_BYTES + _text_bytes(text) for text in params.stop) if params.stop else 0,
        "grammar": 0 if params.grammar is None else _text_bytes(params.grammar.source),
    }


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def largest_field(params: SamplingParams) -> str:
    """The field that takes most of :func:`sampling_bytes`."""
    sizes = _field_bytes(params)
    return max(sizes, key=lambda name: sizes[name])


def _checked_types(params: SamplingParams) -> dict[str, Any]:
    """The values that differ from their defaults. A struct takes anything when it is made: types are checked here."""
    try:
        given = msgspec.to_builtins(params)
        msgspec.convert(given, SamplingParams)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError):
        for name, kind in _TYPES.items():
            _check_type(name, getattr(params, name), kind)
        raise
    return given


def _check_type(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(value), kind)
    except msgspec.ValidationError as error:
        raise SamplingError(name, _PLACE.sub("", str(error)).replace("`", "").lower()) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SamplingError(name, f"a value of type {type(value).__name__} can't be used ({error})") from None


def _check_range(name: str, value: float | None) -> None:
    if value is None:
        return
    low, high = RANGES[name]
    if not low <= value <= high:  # NaN is in no range
        raise SamplingError(name, f"must be between {_number(low)} and {_number(high)}, got {_number(value)}")


def _number(value: float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:g}"
    return text if len(text) <= 32 else text[:29] + "..."


def _check_stop(stop: Iterable[str]) -> None:
    texts = tuple(stop)
    _check_count("stop", texts, MAX_STOP_STRINGS, "strings")
    for text in texts:
        if not text:
            raise SamplingError("stop", "an empty string would end every text")
        if len(text) > MAX_STOP_CHARACTERS:
            raise SamplingError("stop", f"a stop string has {len(text)} characters; {MAX_STOP_CHARACTERS} are allowed")
        _check_text("stop", text)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SamplingError(name, "holds half of a surrogate pair, which is no character") from None


def _check_count(name: str, items: Any, most: int, what: str) -> None:
    if len(items) > most:
        raise SamplingError(name, f"{len(items)} {what}; {most} are allowed")


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise SamplingError(name, f"token id {_number(token_id)} is outside of the vocabulary ({vocab_size} tokens)")


def _check_bias(bias: dict[int, float]) -> None:
    low, high = BIAS_RANGE
    for token_id, value in bias.items():
        if not (low <= value <= high and math.isfinite(value)):
            raise SamplingError("logit_bias", f"token {token_id}: must be between {low:g} and {high:g}, got {_number(value)}")


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer ``index`` of ``n``: the first keeps the request's own (SplitMix64 for the others)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & SEED_MASK
