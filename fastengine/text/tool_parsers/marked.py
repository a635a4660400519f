"""Formats that wrap each call's JSON object in markers, and the states they share."""

from __future__ import annotations

from typing import ClassVar

from fastengine.text.deltas import MarkerFinder
from fastengine.text.tool_parsers.base import ToolParser, any_name
from fastengine.text.tool_parsers.json_reader import CallObjectReader, JsonReader
from fastengine.text.tool_parsers.request import NAME, ToolSpec


class HermesToolParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and others."""

    BEGIN: ClassVar[str] = "<tool_call>"
    END: ClassVar[str] = "</tool_call>"
    _FINDER = MarkerFinder([BEGIN])

    @classmethod
    def call_structure(cls, tool: ToolSpec) -> tuple[str, str, str]:
        return cls.BEGIN, f'{cls.BEGIN}\n{{"name": "{tool.name}", "arguments": ', f"}}\n{cls.END}"

    def begin(self) -> bool:
        place, marker = self._FINDER.find(self.buffer)
        self.content_to(place)
        if not marker:
            return False
        self.consume(len(marker))
        self._reader = CallObjectReader(any_name)
        return self.go(self._call)

    def in_arguments(self) -> bool:
        return self._reader.in_arguments

    def in_framing(self) -> bool:
        return self.state == self._call_end

    def _call(self) -> bool:
        if not self.read_call(self._reader):
            return False
        if self._reader.done:
            self.accept()
            return self.go(self._call_end)
        return self.reject(self.begin)

    def _call_end(self) -> bool:
        """After the object: white space and the end marker, which some models forget."""
        if not self.consume_space():
            return False
        found = self.consume_literal(self.END)
        if found == "":
            return False
        if found is None:
            return self.reject(self.begin)
        self.accept()
        return self.go(self.begin)


class ErnieX1ToolParser(HermesToolParser):
    """ERNIE X1 and ERNIE 4.5 VL Thinking write calls as Hermes does; their reasoning parser unwraps the rest."""


class DeepSeekToolParser(ToolParser):
    """DeepSeek V3 and R1 (type, name, fenced JSON) and V3.1 (name, JSON), told apart call by call::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
    """

    LIST_BEGIN: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    LIST_END: ClassVar[str] = "<｜tool▁calls▁end｜>"
    BEGIN: ClassVar[str] = "<｜tool▁call▁begin｜>"
    SEPARATOR: ClassVar[str] = "<｜tool▁sep｜>"
    END: ClassVar[str] = "<｜tool▁call▁end｜>"
    TYPE: ClassVar[str] = "function"
    FENCE: ClassVar[str] = "```json"
    MAX_HEADER_CHARACTERS: ClassVar[int] = 256
    _FINDER = MarkerFinder([LIST_BEGIN, BEGIN])
    _SEPARATOR_FINDER = MarkerFinder([SEPARATOR])

    def begin(self) -> bool:
        place, marker = self._FINDER.find(self.buffer)
        self.content_to(place)
        if not marker:
            return False
        return self.go(self._between)

    def in_arguments(self) -> bool:
        return not self._arguments.done

    def in_framing(self) -> bool:
        return self.state in (self._call_end, self._between)

    def _between(self) -> bool:
        """Where a call, or the end of the list, may follow."""
        if not self.consume_space():
            return False
        found = self.consume_literal(self.LIST_BEGIN, self.BEGIN, self.LIST_END)
        if found == "":
            return False
        if found is None:
            return self.reject(self.begin)
        if found == self.LIST_END:
            self.accept()
            return self.go(self.begin)
        return self.go(self._header if found == self.BEGIN else self._between)

    def _header(self) -> bool:
        """Up to the separator: ``function`` or the name."""
        place, marker = self._SEPARATOR_FINDER.find(self.buffer)
        if place > self.MAX_HEADER_CHARACTERS or "\n" in self.buffer[:place]:
            return self.reject(self.begin)
        if not marker:
            return False
        self._name = self.consume(place).strip()
        self.consume(len(marker))
        return self.go(self._after_separator)

    def _after_separator(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] == "{":
            return self.go(self._opening)
        return self.go(self._name_line) if self._name == self.TYPE else self.reject(self.begin)

    def _name_line(self) -> bool:
        """V3: the header was the type, the name follows on a line of its own, then the fence."""
        line, newline, _ = self.buffer.partition("\n")
        if len(line) > self.MAX_HEADER_CHARACTERS:
            return self.reject(self.begin)
        if not newline:
            return False
        self._name = self.consume(len(line) + 1).strip()
        return self.go(self._fence)

    def _fence(self) -> bool:
        if not self.consume_space():
            return False
        found = self.consume_literal(self.FENCE)
        if found == "":
            return False
        return self.go(self._opening)

    def _opening(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "{" or NAME.fullmatch(self._name) is None:
            return self.reject(self.begin)
        self.announce(self._name)
        self._arguments = JsonReader()
        return self.go(self._in_call)

    def _in_call(self) -> bool:
        if not self.read_arguments(self._arguments):
            return False
        if self._arguments.failed:
            return self.reject(self.begin)
        self.accept()
        return self.go(self._call_end)

    def _call_end(self) -> bool:
        """After the arguments: the fence's end, if there is one, and the end marker."""
        if not self.consume_space():
            return False
        found = self.consume_literal("```", self.END)
        if found == "":
            return False
        if found is None:
            return self.reject(self.begin)
        if found == self.END:
            self.accept()
            return self.go(self._between)
        return True


class DeepSeekV3ToolParser(DeepSeekToolParser):
    """The same, and strict tools can be enforced, for DeepSeek V3 and R1."""

    @classmethod
    def call_structure(cls, tool: ToolSpec) -> tuple[str, str, str]:
        return cls.BEGIN, f"{cls.BEGIN}{cls.TYPE}{cls.SEPARATOR}{tool.name}\n{cls.FENCE}\n", f"\n```{cls.END}"


class DeepSeekV31ToolParser(DeepSeekToolParser):
    """The same, and strict tools can be enforced, for DeepSeek V3.1."""

    @classmethod
    def call_structure(cls, tool: ToolSpec) -> tuple[str, str, str]:
        return cls.BEGIN, f"{cls.BEGIN}{tool.name}{cls.SEPARATOR}", cls.END
