"""Reasoning between ``<think>`` and ``</think>`` at the beginning of an answer, as most models write it.

Whether the model starts inside its reasoning is read off the prompt, whose template may have opened or
closed the tag already; only when that is unknown does the model family decide. The marker counts once:
tags that the content mentions later are content. Newlines next to the markers are framing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from fastengine.text.deltas import MAX_HELD_SPACE, Delta, MarkerFinder, TrailingSpace, match_start
from fastengine.text.reasoning_parsers.base import ReasoningContext, ReasoningParser


class LeadingSection:
    """Parts a text, as it comes in, into the section between two markers that it may begin with, and the rest.

    The states are start, head (newlines behind the first marker), inside, gap (newlines behind the last), rest. Each takes
    from the front of the buffer and returns what it emits; ``inside`` says of the text that it begins in the section.
    """

    def __init__(self, begin: str, end: str, *, inside: bool = False):
        self._begin = begin
        self._starts_inside = inside
        self._finder = MarkerFinder([end])
        self._buffer = ""
        self._newlines = TrailingSpace("\n")
        self._state: Callable[[], str] = self._start

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """What can be told by now: pieces of text, each with whether it is of the section."""
        if self._state == self._rest:
            return [(False, text)] if text else []
        self._buffer += text
        pieces: list[tuple[bool, str]] = []
        while self._buffer:
            state = self._state
            emitted = state()
            if emitted:
                pieces.append((state == self._inside, emitted))
            if self._state == state:
                break
        return pieces

    def finish(self) -> tuple[bool, str]:
        """What was held back, and whether it is of the section."""
        rest, self._buffer = self._newlines.take() + self._buffer, ""
        return self._state == self._inside or (self._state == self._start and self._starts_inside), rest

    def _start(self) -> str:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) <= MAX_HELD_SPACE:
            found = match_start(text, (self._begin,))
            if found == "":
                return ""
            if found:
                self._buffer = text[len(found) :]
                self._state = self._head
                return ""
        self._state = self._head if self._starts_inside else self._rest
        return ""

    def _head(self) -> str:
        return self._skip_newlines(self._inside)

    def _inside(self) -> str:
        place, marker = self._finder.find(self._buffer)
        text = self._newlines.feed(self._buffer[:place])
        self._buffer = self._buffer[place + len(marker) :]
        if marker:
            self._newlines.take()
            self._state = self._gap
        return text

    def _gap(self) -> str:
        return self._skip_newlines(self._rest)

    def _rest(self) -> str:
        text, self._buffer = self._buffer, ""
        return text

    def _skip_newlines(self, then: Callable[[], str]) -> str:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = then
        return ""


class ThinkTagParser(ReasoningParser):
    """The section at the beginning of an answer is its reasoning."""

    BEGIN: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"
    # Whether the model begins inside its reasoning when neither the prompt nor the request tells.
    STARTS_INSIDE: ClassVar[bool] = False

    def __init__(self, context: ReasoningContext):
        super().__init__(context)
        self._section = LeadingSection(self.BEGIN, self.END, inside=self.starts_inside(context))

    def starts_inside(self, context: ReasoningContext) -> bool:
        end = context.prompt[-256:].rstrip()
        if end.endswith(self.BEGIN):
            return True
        if end.endswith(self.END) or context.enable_thinking is False:
            return False
        return self.STARTS_INSIDE

    def feed(self, text: str) -> list[Delta]:
        return [delta for piece in self._section.feed(text) for delta in self._deltas(*piece)]

    def finish(self) -> list[Delta]:
        is_reasoning, rest = self._section.finish()
        deltas = self._deltas(is_reasoning, rest) if rest else []
        return deltas if is_reasoning else deltas + self.content_end()

    def content(self, text: str) -> list[Delta]:
        """Content, for parsers that find more in it."""
        return [Delta("content", text)]

    def content_end(self) -> list[Delta]:
        return []

    def _deltas(self, is_reasoning: bool, text: str) -> list[Delta]:
        return [Delta("reasoning", text)] if is_reasoning else self.content(text)


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """DeepSeek R1: the template opens the reasoning; V3.1's closes it when thinking is off."""

    STARTS_INSIDE = True


class Qwen3ReasoningParser(ThinkTagParser):
    """Qwen3: the model opens its reasoning itself, if it reasons; Qwen3-Thinking's template opens it."""


class Ernie45VLReasoningParser(ThinkTagParser):
    """ERNIE 4.5 VL: the template opens the reasoning, or closes it when thinking is off."""

    STARTS_INSIDE = True


class ErnieX1ReasoningParser(ThinkTagParser):
    """ERNIE X1: the template opens the reasoning, and the answer stands between ``<response>`` and ``</response>``."""

    STARTS_INSIDE = True

    def __init__(self, context: ReasoningContext):
        super().__init__(context)
        self._response = LeadingSection("<response>", "</response>")

    def content(self, text: str) -> list[Delta]:
        return [Delta("content", piece) for _, piece in self._response.feed(text)]

    def content_end(self) -> list[Delta]:
        _, rest = self._response.finish()
        return [Delta("content", rest)] if rest else []
