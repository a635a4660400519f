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


class ThinkTagParser(ReasoningParser):
    """The states are start, reasoning, gap (newlines behind the end marker), content."""

    BEGIN: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"
    # Whether the model begins inside its reasoning when neither the prompt nor the request tells.
    STARTS_INSIDE: ClassVar[bool] = False
    _FINDER = MarkerFinder([END])

    def __init__(self, context: ReasoningContext):
        super().__init__(context)
        self._inside = self.starts_inside(context)
        self._buffer = ""
        self._newlines = TrailingSpace("\n")
        self._state: Callable[[], str] = self._start

    def starts_inside(self, context: ReasoningContext) -> bool:
        end = context.prompt[-256:].rstrip()
        if end.endswith(self.BEGIN):
            return True
        if end.endswith(self.END) or context.enable_thinking is False:
            return False
        return self.STARTS_INSIDE

    def feed(self, text: str) -> list[Delta]:
        if self._state == self._content:
            return self.content(text) if text else []
        self._buffer += text
        deltas: list[Delta] = []
        while self._buffer:
            state = self._state
            emitted = state()
            if emitted:
                deltas += [Delta("reasoning", emitted)] if state == self._reasoning else self.content(emitted)
            if self._state == state:
                break
        return deltas

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._newlines.take() + self._buffer, ""
        in_reasoning = self._state == self._reasoning or (self._state == self._start and self._inside)
        if in_reasoning:
            return [Delta("reasoning", rest)] if rest else []
        return (self.content(rest) if rest else []) + self.content_end()

    def content(self, text: str) -> list[Delta]:
        """Content, for parsers that find more in it."""
        return [Delta("content", text)]

    def content_end(self) -> list[Delta]:
        return []

    # The states: each takes from the front of the buffer and returns what it emits.

    def _start(self) -> str:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) <= MAX_HELD_SPACE:
            found = match_start(text, (self.BEGIN,))
            if found == "":
                return ""
            if found:
                self._buffer = text[len(found) :]
                self._state = self._reasoning_head
                return ""
        self._state = self._reasoning_head if self._inside else self._content
        return ""

    def _reasoning_head(self) -> str:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._reasoning
        return ""

    def _reasoning(self) -> str:
        place, marker = self._FINDER.find(self._buffer)
        text = self._newlines.feed(self._buffer[:place])
        self._buffer = self._buffer[place + len(marker) :]
        if marker:
            self._newlines.take()
            self._state = self._gap
        return text

    def _gap(self) -> str:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._content
        return ""

    def _content(self) -> str:
        text, self._buffer = self._buffer, ""
        return text


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
        self._response = ResponseUnwrapper()

    def content(self, text: str) -> list[Delta]:
        return _as_content(self._response.feed(text))

    def content_end(self) -> list[Delta]:
        return _as_content(self._response.finish())


class ResponseUnwrapper:
    """Takes ``<response>`` at the beginning of a text and the ``</response>`` that belongs to it away."""

    BEGIN: ClassVar[str] = "<response>"
    END: ClassVar[str] = "</response>"
    _FINDER = MarkerFinder([END])

    def __init__(self) -> None:
        self._buffer = ""
        self._newlines = TrailingSpace("\n")
        self._step: Callable[[], str] = self._start

    def feed(self, text: str) -> str:
        self._buffer += text
        emitted: list[str] = []
        while self._buffer:
            step = self._step
            emitted.append(step())
            if self._step == step:
                break
        return "".join(emitted)

    def finish(self) -> str:
        rest, self._buffer = self._newlines.take() + self._buffer, ""
        return rest

    def _start(self) -> str:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) <= MAX_HELD_SPACE:
            found = match_start(text, (self.BEGIN,))
            if found == "":
                return ""
            if found:
                self._buffer = text[len(found) :]
                self._step = self._head
                return ""
        self._step = self._rest
        return ""

    def _head(self) -> str:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._inside
        return ""

    def _inside(self) -> str:
        place, marker = self._FINDER.find(self._buffer)
        text = self._newlines.feed(self._buffer[:place])
        self._buffer = self._buffer[place + len(marker) :]
        if marker:
            self._newlines.take()
            self._step = self._after
        return text

    def _after(self) -> str:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._step = self._rest
        return ""

    def _rest(self) -> str:
        text, self._buffer = self._buffer, ""
        return text


def _as_content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []
