"""What every tool parser is: a text in pieces goes in, content and tool calls come out.

To write one for ``--tool-parser-plugin``, derive from :class:`ToolParser`, write the states as methods
(each looks at ``self.buffer``, consumes from its front and says whether to go on), and register the
class in the plug-in's ``register(parsers)``. The rules that all parsers here keep:

- The pieces may be cut anywhere: a state decides nothing that the next character could change.
- A call is announced once its name and the first of its arguments are known, and accepted at its end. Until
  then everything read since the marker is kept: when it turns out to be no call it is content as it stands.
- Who sees an answer grow may have been told of a call that turns out to be none. That can't be taken back; it is
  said so (:attr:`Delta.broken`), and the arguments told never are whole: their last brace comes with the call's end.
  Who waits for the whole answer (``whole_calls``) is told of a call only once it is accepted.
- White space next to a marker is framing and is dropped; any other text comes out exactly once.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fastengine.text.deltas import Delta, TrailingSpace, match_start
from fastengine.text.tool_parsers.json_reader import SPACE_CHARACTERS, CallObjectReader, JsonReader
from fastengine.text.tool_parsers.request import ToolSpec

ID_CHARACTERS = string.ascii_letters + string.digits


class ToolParser(ABC):
    """Finds the tool calls in one sequence's text. One instance per sequence.

    Class attributes say what a format is to the rest of the server: ``needs_special_tokens``, that its
    markers may be special tokens, so the text must be decoded with them.
    """

    needs_special_tokens: ClassVar[bool] = True
    # Nobody sees the answer grow: a call is told of once it is accepted.
    whole_calls: bool = False

    def __init__(self, tools: Sequence[ToolSpec] = ()):
        """``tools`` are those the request offers."""
        self.tools = {tool.name: tool for tool in tools}
        self.buffer = ""
        self.num_calls = 0
        self.state: Callable[[], bool] = self.begin
        self._deltas: list[Delta] = []
        self._space = TrailingSpace()
        # Consumed, and not certain yet to be part of a call.
        self._raw: list[str] = []
        self._call_open = False
        self._after_call = False
        # Of the open call: what is told once there is enough of it, or it is accepted.
        self._call_deltas: list[Delta] = []
        self._call_told = False
        self._last_brace = ""

    # What a parser defines.

    @abstractmethod
    def begin(self) -> bool:
        """The first state: consumes content from the front of ``buffer``; True if the state it left behind can go on at once."""

    def in_arguments(self) -> bool:
        """Whether a text that ends here ends within a call's arguments, so that what is left in ``buffer`` belongs to them."""
        return False

    def in_framing(self) -> bool:
        """Whether a text that ends here, behind a call, ends within a marker, so that what is left of it is no content."""
        return False

    def new_call_id(self) -> str:
        """An id for the next call; a format whose template wants ids of another shape overrides it."""
        return "call_" + random_text(24)

    @classmethod
    def call_structure(cls, tool: ToolSpec) -> tuple[str, str, str] | None:
        """(trigger, begin, end) around a call's arguments if the format can be enforced with a structural tag, else None."""
        return None

    # What the server calls.

    def feed(self, text: str) -> list[Delta]:
        """The pieces that are certain once ``text`` has arrived."""
        self.buffer += text
        while self.buffer and self.state():
            pass
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back, when the sequence has ended: ``cut`` off, or by itself.

        A call that was cut off keeps the arguments it has. One that the model left unfinished is broken.
        """
        if self._call_open and cut:
            if self.in_arguments():
                self.arguments(self.buffer)
            self._tell_call()
        elif self._call_open:
            self.consume(len(self.buffer))
            self._break_call()
        elif not (self._after_call and self.in_framing()):
            self.content("".join(self._raw) + self.buffer)
        self.buffer = ""
        self._raw.clear()
        if not self._after_call:
            self._emit("content", self._space.take())
        return self._taken()

    # What states use.

    def go(self, state: Callable[[], bool]) -> bool:
        """Continue with another state; returns True for ``return self.go(...)``."""
        self.state = state
        return True

    def consume(self, length: int) -> str:
        """Take ``length`` characters from the front of the buffer as part of a call that may turn out to be none."""
        text, self.buffer = self.buffer[:length], self.buffer[length:]
        self._raw.append(text)
        return text

    def consume_space(self) -> bool:
        """Take white space from the front of the buffer; False if nothing is left."""
        self.consume(len(self.buffer) - len(self.buffer.lstrip(SPACE_CHARACTERS)))
        return bool(self.buffer)

    def consume_literal(self, *literals: str) -> str | None:
        """Take the literal the buffer begins with and return it; ``""`` while that is open, None if it begins with none."""
        found = match_start(self.buffer, literals)
        if found:
            self.consume(len(found))
        return found

    def content(self, text: str) -> None:
        """Emit content, holding white space at its end back."""
        self._after_call = self._after_call and not text.strip(SPACE_CHARACTERS)
        self._emit("content", self._space.feed(text))

    def content_to(self, length: int) -> None:
        """Emit the first ``length`` characters of the buffer as content."""
        text, self.buffer = self.buffer[:length], self.buffer[length:]
        self.content(text)

    def announce(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. It is told with the first of its arguments, as far as their name: what breaks before it has promised nothing."""
        self._raw.insert(0, self._space.take())  # framing, if it stays a call
        self._call_open = self._after_call = True
        self._add_to_call(Delta("tool", "", self.num_calls, call_id or self.new_call_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit a piece of the open call's arguments, but for a brace that may be their last."""
        if not text:
            return
        text = self._last_brace + text
        self._last_brace = "}" if text[-1] == "}" else ""
        if self._last_brace:
            text = text[:-1]
        if text:
            self._add_to_call(Delta("tool", text, self.num_calls - 1))

    def accept(self) -> None:
        """What was consumed so far is a call, or framing, for good."""
        if self._call_open:
            self._tell_call()
        self._raw.clear()

    def reject(self, state: Callable[[], bool]) -> bool:
        """What was consumed and is not certain yet is content after all; goes on with ``state``."""
        if self._call_open:
            self._break_call()
        else:
            self.content("".join(self._raw))
            self._raw.clear()
        return self.go(state)

    def plain(self) -> bool:
        """The last state of formats that have nothing more to find: everything is content."""
        self.content_to(len(self.buffer))
        return False

    def read_arguments(self, reader: JsonReader) -> bool:
        """Let ``reader`` consume the open call's arguments from the buffer and pass them on. True once it is done or failed."""
        self.consume(reader.feed(self.buffer))
        self.arguments(reader.take())
        return reader.done or reader.failed

    def read_call(self, reader: CallObjectReader) -> bool:
        """Let ``reader`` consume from the buffer, announcing its call and passing its arguments on. True once it is done or failed."""
        consumed = reader.feed(self.buffer)
        self.consume(consumed)
        if reader.ready and not self._call_open:
            assert reader.name is not None
            self.announce(reader.name)
        if self._call_open:
            self.arguments(reader.take())
        return reader.done or reader.failed

    def _add_to_call(self, delta: Delta) -> None:
        self._call_deltas.append(delta)
        if not self.whole_calls and (self._call_told or ":" in delta.text):
            self._call_told = True
            self._deltas += self._call_deltas
            self._call_deltas.clear()

    def _tell_call(self) -> None:
        """The open call is all there is of it."""
        if self._last_brace:
            self._add_to_call(Delta("tool", self._last_brace, self.num_calls - 1))
        self._deltas += self._call_deltas
        self._close_call()

    def _break_call(self) -> None:
        """The open call is none: all of its text is content."""
        if not self._call_told:
            self.num_calls -= 1
        else:
            self._deltas.append(Delta("tool", "", self.num_calls - 1, broken=True))
        text = "".join(self._raw)
        self._close_call()
        self.content(text)

    def _close_call(self) -> None:
        self._call_open = self._call_told = False
        self._last_brace = ""
        self._call_deltas.clear()
        self._raw.clear()

    def _emit(self, kind: Any, text: str) -> None:
        if text:
            self._deltas.append(Delta(kind, text))

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def random_text(length: int) -> str:
    return "".join([secrets.choice(ID_CHARACTERS) for _ in range(length)])


def known_name(tools: Mapping[str, ToolSpec]) -> Callable[[str], bool]:
    """For formats without a marker, where any text may look like a call: only a tool of the request may be called."""
    return lambda name: name in tools


def any_name(name: str) -> bool:
    """For formats with a marker: a call of a tool that does not exist is a call, for the client to answer."""
    return True
