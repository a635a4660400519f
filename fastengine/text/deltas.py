"""What a parsed output consists of, and the search for markers in text that arrives in pieces."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

# White space beside a marker is framing. No more than this much is held back to see whether one follows.
MAX_HELD_SPACE = 64


class Delta(NamedTuple):
    """A piece of the answer.

    ``text`` is content, reasoning, or a part of the ``call_index``-th tool call's arguments (JSON text).
    Each call's first delta, and no other, has its ``call_id`` and ``name``; its ``text`` may be empty.
    ``broken`` says that a call which was begun is none after all: its arguments stay unfinished, its text follows as content.
    """

    kind: Literal["content", "reasoning", "tool"]
    text: str
    call_index: int = 0
    call_id: str | None = None
    name: str | None = None
    broken: bool = False


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """The same pieces with neighbours that belong together joined, and empty ones left out."""
    out: list[Delta] = []
    for delta in deltas:
        if not delta.text and delta.name is None and not delta.broken:
            continue
        last = out[-1] if out else None
        if last is not None and last.kind == delta.kind and last.call_index == delta.call_index and delta.name is None and not delta.broken:
            out[-1] = last._replace(text=last.text + delta.text)
        else:
            out.append(delta)
    return out


class MarkerFinder:
    """Finds the first of some markers, none of which begins with another."""

    def __init__(self, markers: Iterable[str]):
        """Raises ValueError if one marker begins with another, or is empty: which one is meant could change with the next piece."""
        ordered = sorted(markers)
        if "" in ordered or any(longer.startswith(shorter) for shorter, longer in itertools.pairwise(ordered)):
            raise ValueError(f"none of the markers {ordered} may be empty or begin with another")
        self._pattern = re.compile("|".join(map(re.escape, ordered)))
        self._beginnings = frozenset(marker[:n] for marker in ordered for n in range(1, len(marker)))
        self._first_characters = frozenset(marker[0] for marker in ordered)
        self._longest = max(map(len, ordered))

    def find(self, text: str) -> tuple[int, str]:
        """(place, marker) of the first one; without any (place, ``""``) of the end of ``text`` that may still become one."""
        if self._first_characters.isdisjoint(text):
            return len(text), ""
        match = self._pattern.search(text)
        if match is not None:
            return match.start(), match.group()
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first_characters and text[place:] in self._beginnings:
                return place, ""
        return len(text), ""


def match_start(text: str, literals: Sequence[str]) -> str | None:
    """The literal that ``text`` begins with; ``""`` while it may still become one; None when it can't."""
    for literal in literals:
        if text.startswith(literal):
            return literal
    return "" if any(literal.startswith(text) for literal in literals) else None


class TrailingSpace:
    """Holds back the white space at the end of a text until it is known whether a marker follows."""

    def __init__(self, characters: str = " \t\r\n"):
        self._characters = characters
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may be emitted now."""
        if not self._held and (not text or text[-1] not in self._characters):
            return text
        whole = self._held + text
        kept = max(len(whole.rstrip(self._characters)), len(whole) - MAX_HELD_SPACE)
        self._held = whole[kept:]
        return whole[:kept]

    def take(self) -> str:
        """What is held; it is no longer held."""
        held, self._held = self._held, ""
        return held
