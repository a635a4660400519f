"""What the tests of parsers share: feeding a text in pieces, and its result in a form that can be compared."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from hypothesis import strategies as st

from fastengine.text.deltas import Delta

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "get_weather"}},
]

ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


class Parser(Protocol):
    """Of reasoning, of tools, or of both. That a sequence was cut off is said to the latter two alone."""

    def feed(self, text: str) -> list[Delta]: ...

    @property
    def finish(self) -> Callable[..., list[Delta]]: ...


def parse(parser: Parser, pieces: Sequence[str], *, end_cut: bool = False) -> list[Any]:
    """Runs of reasoning and content as (kind, text), and calls as (name, arguments), or (name, arguments, "broken"), in order.

    ``end_cut``: the sequence was cut off.
    """
    out: list[Any] = []
    calls: list[list[str]] = []
    ids: set[str] = set()
    for delta in [*itertools.chain.from_iterable(parser.feed(piece) for piece in pieces), *(parser.finish(cut=True) if end_cut else parser.finish())]:
        if delta.kind != "tool":
            if out and out[-1][0] == delta.kind:
                out[-1] = (delta.kind, out[-1][1] + delta.text)
            else:
                out.append((delta.kind, delta.text))
            continue
        if delta.broken:
            assert (delta.text, delta.name, delta.call_index) == ("", None, len(calls) - 1)
            calls[-1].append("broken")
            continue
        if delta.name is not None:
            assert delta.call_id
            assert delta.call_index == len(calls)
            assert delta.call_id not in ids
            ids.add(delta.call_id)
            calls.append([delta.name, ""])
            out.append(calls[-1])
        else:
            assert delta.call_id is None
            assert delta.text
        # A call's pieces come before the next call's, and before it is told to be broken.
        assert delta.call_index == len(calls) - 1
        assert len(calls[-1]) == 2
        calls[-1][1] += delta.text
    return [tuple(item) for item in out]


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def parse_everywhere(make: Callable[[], Parser], text: str, places: Iterable[int] | None = None) -> list[Any]:
    """The result of the whole text, which every split in two (at ``places`` only) and single characters must give too."""
    whole = parse(make(), [text])
    assert parse(make(), list(text)) == whole
    for place in range(1, len(text)) if places is None else places:
        assert parse(make(), [text[:place], text[place:]]) == whole, (text[:place], text[place:])
    return whole


def calls_of(result: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(item[0], json.loads(item[1])) for item in result if item[0] not in ("content", "reasoning")]


def content_of(result: Sequence[Any]) -> str:
    return "".join(item[1] for item in result if item[0] == "content")


def without_broken(result: Sequence[Any]) -> list[Any]:
    """What is left for who takes broken calls for none."""
    out: list[Any] = []
    for item in result:
        if item[-1] == "broken" and len(item) == 3:
            continue
        if out and out[-1][0] == item[0] == "content":
            out[-1] = ("content", out[-1][1] + item[1])
        else:
            out.append(item)
    return out
