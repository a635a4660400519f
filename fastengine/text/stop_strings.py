"""Finding stop strings in text that arrives in pieces, holding back no more than could still become one.

The method is Aho and Corasick's: one automaton for all stop strings of a request, one step per
character. The automaton's state is the longest end of the text that begins a stop string, which is
exactly what must be held back::

    stop "\\n\\nUser:"      text  "Hello.\\n\\nUs"
                                  ^^^^^^ may go   ^^^^ held
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStringMatcher:
    """Watches one sequence. Of several stop strings the one that is complete first wins, then the longest."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False):
        """Raises ValueError on an empty stop string."""
        self._automaton = _automaton(tuple(stops))
        self._include = include_in_output
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """(text that may be emitted, the stop string that ended it or None). Not to be called after a match.

        Not ``may_end``: a stop string that becomes complete within ``text`` is text like any other.
        """
        automaton = self._automaton
        state = self._state
        if state == 0 and automaton.first_characters.isdisjoint(text):
            return text, None
        next_states, fallback, matches = automaton.next_states, automaton.fallback, automaton.matches
        for position, character in enumerate(text):
            while character not in next_states[state] and state:
                state = fallback[state]
            state = next_states[state].get(character, 0)
            stop = matches[state]
            if stop is not None and may_end:
                return self._matched(self._held + text[: position + 1], stop), stop
        while state and not next_states[state]:  # a whole stop string that was let go: only its end may begin another
            state = fallback[state]
        self._state = state
        whole = self._held + text
        held = automaton.depth[state]
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], None

    def flush(self) -> str:
        """What was held back, when the sequence ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _matched(self, whole: str, stop: str) -> str:
        self._held, self._state = "", 0
        return whole if self._include else whole[: len(whole) - len(stop)]


class _Automaton:
    """States are the beginnings of stop strings; 0 is the empty one."""

    def __init__(self, stops: tuple[str, ...]):
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.next_states: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        # The longest stop string that ends in a state, or None.
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self.fallback: list[int] = [0] * len(self.next_states)
        self._link()
        self.first_characters = frozenset(self.next_states[0])

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next_states[state]:
                self.next_states[state][character] = len(self.next_states)
                self.next_states.append({})
                self.depth.append(self.depth[state] + 1)
                self.matches.append(None)
            state = self.next_states[state][character]
        self.matches[state] = stop

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest proper end of it that is a state too."""
        queue = deque(self.next_states[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.next_states[state].items():
                other = self.fallback[state]
                while other and character not in self.next_states[other]:
                    other = self.fallback[other]
                self.fallback[child] = self.next_states[other].get(character, 0)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[self.fallback[child]]
                queue.append(child)


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
