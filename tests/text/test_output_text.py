"""Detokenizer and stop strings together, as a request sees them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastengine.protocol.requests import SamplingParams
from fastengine.text.output_text import OutputText, TextDelta
from fastengine.text.tokenizer import Tokenizer


def collect(output: OutputText, token_ids: list[int], cuts: list[int] | None = None) -> str:
    edges = [0, *sorted(cuts or range(len(token_ids))), len(token_ids)]
    text = ""
    for start, end in itertools.pairwise(edges):
        delta = output.add(token_ids[start:end])
        text += delta.text
        if delta.stop_hit is not None:
            return text
    return text + output.finish()


def test_plain_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The quick fox 😀 café")
    output = OutputText(byte_level, [], SamplingParams())
    assert collect(output, ids) == "The quick fox 😀 café"
    assert output.finished
    assert output.finish() == ""
    with pytest.raises(RuntimeError, match="no token may follow"):
        output.add(ids)


def test_the_stop_token_has_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two")
    for skip in (True, False):
        sampling = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True)
        output = OutputText(byte_level, [], sampling)
        assert output.add([*ids, 2], stop_token_id=2) == TextDelta("one two", None, len(ids) + 1)
        assert output.finish() == ""
        # An ordinary word as a stop token has none either.
        output = OutputText(byte_level, [], sampling)
        assert output.add(ids, stop_token_id=ids[-1]).text + output.finish() == byte_level.decode(ids[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_the_middle_of_many_tokens(byte_level: Tokenizer, include: bool) -> None:
    ids = byte_level.encode("The quick brown fox jumps over")
    through_fox = next(n for n in range(len(ids)) if "fox" in byte_level.decode(ids[:n]))
    output = OutputText(byte_level, [], SamplingParams(stop=("fox",), include_stop_str_in_output=include))
    delta = output.add(ids)
    assert delta == TextDelta("The quick brown fox" if include else "The quick brown ", "fox", through_fox)
    assert output.finish() == ""
    assert output.stop_hit == "fox"


def test_no_stop_string_counts_in_the_first_min_tokens_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a, b, c, d")
    commas = [n for n in range(1, len(ids) + 1) if byte_level.decode(ids[:n]).endswith(",")]
    for min_tokens in range(len(ids) + 1):
        output = OutputText(byte_level, [], SamplingParams(stop=(",",), min_tokens=min_tokens))
        text = collect(output, ids)
        end = next((n for n in commas if n > min_tokens), None)
        assert text == (byte_level.decode(ids) if end is None else byte_level.decode(ids[:end]).removesuffix(","))
        assert output.stop_hit == (None if end is None else ",")


def test_held_text_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, [], SamplingParams(stop=("dogs!",)))
    delta = output.add(byte_level.encode("lazy dog"))
    assert delta.text == "lazy "
    assert output.finish() == "dog"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_grouping_of_tokens_gives_the_same(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    stops = tuple(data.draw(st.lists(st.sampled_from(["e", "th", "�", " a", "he", "\n\n"]), max_size=2)))
    sampling = SamplingParams(stop=stops)
    whole = byte_level.decode(ids)
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    expected = whole if not ends else whole[: sum(min(ends))]
    assert collect(OutputText(byte_level, [], sampling), ids) == expected
    assert collect(OutputText(byte_level, [], sampling), ids, cuts) == expected
    assert collect(OutputText(byte_level, [], sampling, track_offsets=True), ids, cuts) == expected


def test_offsets(byte_level: Tokenizer) -> None:
    text = "The fox 🚗!"
    ids = byte_level.encode(text)
    output = OutputText(byte_level, [], SamplingParams(), track_offsets=True)
    output.add(ids[:2])
    output.add([*ids[2:], 2], stop_token_id=2)
    car = text.index("🚗")
    assert len(output.token_offsets) == len(ids) + 1
    assert output.token_offsets[0] == 0
    assert output.token_offsets[-1] == len(text)
    assert output.token_offsets.count(car) >= 2  # more than one token makes it up, and each begins there
    for offset, token_id in zip(output.token_offsets, ids, strict=False):
        piece = byte_level.token_bytes(token_id).decode("utf-8", "ignore")
        assert text[offset:].startswith(piece)
