"""Tool calls written as a Python list of calls: ``[get_weather(city="Paris"), now()]``."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from fastengine.text.deltas import MarkerFinder, match_start
from fastengine.text.tool_parsers.base import ToolParser
from fastengine.text.tool_parsers.python_reader import PythonReader

CALL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
ARGUMENT_NAME = re.compile(r"[^\W\d]\w*")
MAX_NAME_CHARACTERS = 128


class PythonicToolParser(ToolParser):
    """Llama 3.2 and 4 and others. Arguments come out as JSON.

    The list is at the answer's beginning or behind ``<|python_start|>``; a list that does not begin
    with a call of one of the request's tools is content. Arguments are literals passed by keyword.
    """

    BEGIN: ClassVar[str] = "<|python_start|>"
    END: ClassVar[str] = "<|python_end|>"
    _FINDER = MarkerFinder([BEGIN])

    def begin(self) -> bool:
        if not self.consume_space():
            return False
        found = match_start(self.buffer, (self.BEGIN, "["))
        if found == "":
            return False
        if found is None:
            return self.reject(self._content)
        self.consume(len(found))
        return self.go(self._element if found == "[" else self._bracket)

    def in_arguments(self) -> bool:
        return not self._value.done

    def in_framing(self) -> bool:
        return self.state == self._end_marker

    def _bracket(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "[":
            return self.reject(self._content)
        self.consume(1)
        return self.go(self._element)

    def _element(self) -> bool:
        """A call, or the list's end (Python allows a comma before it)."""
        if not self.consume_space():
            return False
        if self.buffer[0] == "]" and self.num_calls:
            return self._list_end()
        name = self._word(CALL_NAME)
        if name == "":
            return False
        if name not in self.tools:
            return self.reject(self._content)
        self.consume(len(name))
        self._name = name
        return self.go(self._parenthesis)

    def _parenthesis(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "(":
            return self.reject(self._content)
        self.consume(1)
        self._keys: set[str] = set()
        return self.go(self._argument)

    def _argument(self) -> bool:
        """``key =``, or the call's end (Python allows a comma before it)."""
        if not self.consume_space():
            return False
        if self.buffer[0] == ")":
            return self._call_end()
        key = self._word(ARGUMENT_NAME)
        if key == "":
            return False
        if key is None or key in self._keys:
            return self.reject(self._content)
        self.consume(len(key))
        self._key = key
        return self.go(self._equals_sign)

    def _equals_sign(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "=":
            return self.reject(self._content)
        self.consume(1)
        if not self._keys:
            self.announce(self._name)
        self.arguments(f"{', ' if self._keys else '{'}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._keys.add(self._key)
        self._value = PythonReader()
        return self.go(self._in_value)

    def _in_value(self) -> bool:
        self.consume(self._value.feed(self.buffer))
        self.arguments(self._value.take())
        if self._value.failed:
            return self.reject(self._content)
        return self.go(self._after_value) if self._value.done else False

    def _after_value(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] == ")":
            return self._call_end()
        if self.buffer[0] != ",":
            return self.reject(self._content)
        self.consume(1)
        return self.go(self._argument)

    def _call_end(self) -> bool:
        if not self._keys:
            self.announce(self._name)
        self.arguments("}" if self._keys else "{}")
        self.consume(1)
        self.accept()
        return self.go(self._after_element)

    def _after_element(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] == "]":
            return self._list_end()
        if self.buffer[0] != ",":
            return self.reject(self._content)
        self.consume(1)
        return self.go(self._element)

    def _list_end(self) -> bool:
        self.consume(1)
        self.accept()
        return self.go(self._end_marker)

    def _end_marker(self) -> bool:
        if not self.consume_space():
            return False
        found = self.consume_literal(self.END)
        if found == "":
            return False
        if found is None:
            return self.reject(self._content)
        self.accept()
        return self.go(self._content)

    def _content(self) -> bool:
        place, marker = self._FINDER.find(self.buffer)
        self.content_to(place)
        if not marker:
            return False
        self.consume(len(marker))
        return self.go(self._bracket)

    def _word(self, pattern: re.Pattern[str]) -> str | None:
        """The word the buffer begins with; ``""`` while it may go on, None if it is none or too long for one."""
        match = pattern.match(self.buffer)
        if match is None or match.end() > MAX_NAME_CHARACTERS:
            return None
        return "" if match.end() == len(self.buffer) else match.group()
