"""The matcher against a naive search of the whole text, over every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.text.stop_strings import StopStringMatcher


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that is complete first; the longest of those that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    matcher = StopStringMatcher(stops, include_in_output=include)
    emitted: list[str] = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        emitted.append(text)
        if stop is not None:
            return "".join(emitted), stop, emitted
    return "".join(emitted) + matcher.flush(), None, emitted


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=600, deadline=None)
@given(
    st.text(alphabet="ab\n", max_size=24),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=10),
    st.booleans(),
)
def test_equals_naive_search(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    output, stop, _ = run(cut(text, cuts), stops, include)
    expected = naive(text, stops)
    if expected is None:
        assert (output, stop) == (text, None)
    else:
        end, wanted = expected
        assert stop == wanted
        assert output == text[: end if include else end - len(wanted)]


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="abc", max_size=20), st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=3))
def test_holds_back_only_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    emitted = ""
    for position, character in enumerate(text):
        part, stop = matcher.feed(character)
        emitted += part
        if stop is not None:
            return
        seen = text[: position + 1]
        held = max((k for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])), default=0)
        assert emitted == seen[: len(seen) - held]


def test_every_two_way_split() -> None:
    text, stop = "1. 1\n2. 2\n3\n4. 4 rest", "3\n4. 4"
    for position in range(len(text) + 1):
        output, hit, emitted = run([text[:position], text[position:]], [stop], False)
        assert (output, hit) == ("1. 1\n2. 2\n", stop)
        assert not any(stop in part for part in emitted)


def test_the_first_complete_wins_then_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"], False)[:2] == ("a", "bc")
    assert run(["xabc"], ["bc", "abc", "c"], False)[:2] == ("x", "abc")


def test_plain_text_passes_whole() -> None:
    matcher = StopStringMatcher(["###"])
    assert matcher.feed("nothing here") == ("nothing here", None)
    assert matcher.feed("a##") == ("a", None)
    assert matcher.feed("b") == ("##b", None)
    assert matcher.flush() == ""


def test_flush_gives_what_was_held() -> None:
    matcher = StopStringMatcher(["END!"])
    assert matcher.feed("the END") == ("the ", None)
    assert matcher.flush() == "END"


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet="ab", max_size=12),
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_what_is_complete_too_early_is_text(early: str, late: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    output = ""
    for position, character in enumerate(early):
        part, stop = matcher.feed(character, may_end=False)
        output += part
        assert stop is None
        seen = early[: position + 1]
        held = max((k for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])), default=0)
        assert output == seen[: len(seen) - held]
    part, hit = matcher.feed(late)
    output += part if hit is not None else part + matcher.flush()
    whole = early + late
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(early) + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    end, _, wanted = min(ends, default=(len(whole), 0, None))
    assert hit == wanted
    assert output == whole[: end - len(wanted or "")]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStringMatcher(["a", ""])
