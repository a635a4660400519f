"""The rules of sampling values, and that every value they let through can be computed with."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastengine.protocol.requests import GrammarSpec, ReasoningSpec, SamplingParams
from fastengine.sampling_rules import MAX_SAMPLING_BYTES, RANGES, SamplingError, check_sampling, sampling_bytes

VOCAB_SIZE = 256
NUMBERS = [0, 1, -1, 2.5, 1e-300, 5e-324, 1e39, 1e308, math.inf, -math.inf, math.nan, 2**31, 2**63, -(2**63) - 1, 10**400, True, None]
ODD = [*NUMBERS, "1", "", b"1", [], {}, [1], object(), np.float32(0.5), "\ud800"]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_any_value_is_taken_or_refused_by_its_name(name: str) -> None:
    for value in ODD:
        params = SamplingParams(**{name: value})
        refused = ""
        try:
            check_sampling(params, VOCAB_SIZE)
        except SamplingError as error:
            refused = f"{error.field} {error}"
        if refused:
            assert refused.startswith(f"{name} {name}: "), value
        else:
            msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


@given(st.sampled_from(sorted(RANGES)), st.floats() | st.integers())
def test_what_passes_is_itself_in_float32(name: str, value: float) -> None:
    params = SamplingParams(**{name: value})
    try:
        check_sampling(params, VOCAB_SIZE)
    except SamplingError:
        return
    small = np.float32(value)
    assert np.isfinite(small)
    if name == "repetition_penalty":
        assert small > 0
        assert np.isfinite(np.float32(100) / small)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_tokens=2.5), "max_tokens: expected int | null, got float"),  # type: ignore[arg-type]
        (SamplingParams(repetition_penalty=1e-300), "repetition_penalty: must be between 0.001 and 1000, got 1e-300"),
        (SamplingParams(seed=2**63), "seed: must be between"),
        (SamplingParams(stop="end"), "stop: expected array, got str"),  # type: ignore[arg-type]
        (SamplingParams(stop=5), "stop: expected array, got int"),  # type: ignore[arg-type]
        (SamplingParams(stop=("",)), "stop: an empty string"),
        (SamplingParams(stop=("\ud800",)), "stop: holds half of a surrogate pair"),
        (SamplingParams(stop=("x" * 1025,)), "stop: a stop string has 1025 characters"),
        (SamplingParams(stop_token_ids=(256,)), "stop_token_ids: token id 256 is outside"),
        (SamplingParams(bad_words_token_ids=((1, -1),)), "bad_words_token_ids: token id -1 is outside"),
        (SamplingParams(logit_bias={256: 1.0}), "logit_bias: token id 256 is outside"),
        (SamplingParams(logit_bias={5: math.nan}), "logit_bias: token 5: must be between"),
        (SamplingParams(min_tokens=3, max_tokens=2), "min_tokens: 3 is more than max_tokens (2)"),
        (SamplingParams(logprobs=257), "logprobs: must be between 0 and 20, got 257"),
        (SamplingParams(grammar=GrammarSpec("regex", "\ud800")), "grammar: holds half"),
        (SamplingParams(grammar=GrammarSpec("regex", "é" * MAX_SAMPLING_BYTES)), "grammar: the request's sampling settings take"),
        (SamplingParams(reasoning=ReasoningSpec(end_token_id=256)), "reasoning: token id 256 is outside"),
        (SamplingParams(reasoning=ReasoningSpec(end_token_id=1, max_tokens=2**40)), "reasoning: max_tokens must be"),
    ],
)
def test_refusals_say_what_is_wrong(params: SamplingParams, words: str) -> None:
    with pytest.raises(SamplingError, match=re.escape(words)):
        check_sampling(params, VOCAB_SIZE)


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": dict.fromkeys(range(1 << 16), -99.123456789)},
        {"stop_token_ids": tuple(range(1 << 16, (1 << 16) + 1000))},
        {"bad_words_token_ids": tuple((1 << 20, 1 << 20, 7) for _ in range(500))},
        {"stop": ("é" * 1000, "x" * 1000), "grammar": GrammarSpec("regex", "日本" * 1000)},
        {name: 1e-9 if name != "seed" else 2**62 for name in RANGES},
    ],
)
def test_the_size_is_never_underestimated(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert len(msgspec.msgpack.encode(params)) <= sampling_bytes(params)
