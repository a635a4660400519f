"""Formats that write JSON call objects one after another, without markers around each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from fastengine.text.deltas import MarkerFinder, match_start
from fastengine.text.tool_parsers.base import ToolParser, any_name, known_name, random_text
from fastengine.text.tool_parsers.json_reader import CallObjectReader, JsonReader
from fastengine.text.tool_parsers.request import ToolSpec

NAME_RUN = re.compile(r"[A-Za-z0-9_.-]*")
MAX_NAME_CHARACTERS = 128


class CallListParser(ToolParser):
    """States for ``[{"name": ..., "arguments": {...}}, ...]`` once its bracket is consumed."""

    _reader: CallObjectReader

    def after_list(self) -> bool:
        """The state behind the list, or behind what turned out not to be one."""
        raise NotImplementedError

    def accepts(self, name: str) -> bool:
        return any_name(name)

    def in_arguments(self) -> bool:
        return self._reader.in_arguments

    def first_item(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] == "]":
            return self.reject(self.after_list)  # a list of nothing is no call
        return self._item()

    def _item(self) -> bool:
        self._reader = CallObjectReader(self.accepts)
        return self.go(self._call)

    def _call(self) -> bool:
        if not self.read_call(self._reader):
            return False
        if self._reader.failed:
            return self.reject(self.after_list)
        self.accept()
        return self.go(self._after_item)

    def _after_item(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] == "]":
            return self._list_end()
        if self.buffer[0] != ",":
            return self.reject(self.after_list)
        self.consume(1)
        return self._item()

    def _list_end(self) -> bool:
        self.consume(1)
        self.accept()
        return self.go(self.after_list)


class MistralToolParser(CallListParser):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`` of older Mistral models, and of newer ones

    ``[TOOL_CALLS]NAME{...}[TOOL_CALLS]NAME{...}`` or ``[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}``.
    """

    BEGIN: ClassVar[str] = "[TOOL_CALLS]"
    CALL_ID: ClassVar[str] = "[CALL_ID]"
    ARGUMENTS: ClassVar[str] = "[ARGS]"
    _FINDER = MarkerFinder([BEGIN])

    def new_call_id(self) -> str:
        # Mistral's templates refuse ids of any other length.
        return random_text(9)

    def begin(self) -> bool:
        place, marker = self._FINDER.find(self.buffer)
        self.content_to(place)
        if not marker:
            return False
        self.consume(len(marker))
        return self.go(self._after_marker)

    def after_list(self) -> bool:
        return self.go(self.begin)

    def in_arguments(self) -> bool:
        return self._reader.in_arguments if self._arguments is None else not self._arguments.done

    def _after_marker(self) -> bool:
        if not self.consume_space():
            return False
        self._call_id: str | None = None
        self._arguments: JsonReader | None = None
        if self.buffer[0] == "[":
            self.consume(1)
            return self.go(self.first_item)
        return self.go(self._name)

    def _name(self) -> bool:
        word = self._word()
        if word is not None:
            self._call_name = word
            return self.go(self._after_name)
        return self._undecided()

    def _after_name(self) -> bool:
        if not self.consume_space():
            return False
        found = match_start(self.buffer, (self.CALL_ID, self.ARGUMENTS, "{"))
        if found == "":
            return False
        if found is None or (found == self.CALL_ID and self._call_id is not None):
            return self.reject(self.begin)
        if found == "{":
            return self.go(self._opening)
        self.consume(len(found))
        return self.go(self._id if found == self.CALL_ID else self._opening)

    def _id(self) -> bool:
        word = self._word()
        if word is not None:
            self._call_id = word
            return self.go(self._after_name)
        return self._undecided()

    def _opening(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "{":
            return self.reject(self.begin)
        self.announce(self._call_name, self._call_id)
        self._arguments = JsonReader()
        return self.go(self._in_arguments)

    def _in_arguments(self) -> bool:
        assert self._arguments is not None
        if not self.read_arguments(self._arguments):
            return False
        if self._arguments.failed:
            return self.reject(self.begin)
        self.accept()
        return self.go(self.begin)

    def _word(self) -> str | None:
        """A name or an id, consumed; None while it may go on, or when there is none."""
        match = NAME_RUN.match(self.buffer)
        assert match is not None
        if match.end() == len(self.buffer) or not 0 < match.end() <= MAX_NAME_CHARACTERS:
            return None
        return self.consume(match.end())

    def _undecided(self) -> bool:
        """Waits for a word's end; goes back to content when there is no word or it is too long for one."""
        match = NAME_RUN.match(self.buffer)
        assert match is not None
        if 0 < match.end() <= MAX_NAME_CHARACTERS:
            return False
        return self.reject(self.begin)


class LlamaJsonToolParser(ToolParser):
    """``{"name": ..., "parameters": {...}}``, several separated by ``;``, as Llama 3 writes them.

    Calls are at the answer's beginning or behind ``<|python_tag|>``; a JSON object that is not a call
    of one of the request's tools is content.
    """

    TAG: ClassVar[str] = "<|python_tag|>"
    _FINDER = MarkerFinder([TAG])

    def begin(self) -> bool:
        if not self.consume_space():
            return False
        found = match_start(self.buffer, (self.TAG, "{"))
        if found == "":
            return False
        return self.reject(self._content) if found is None else self._object(found)

    def in_arguments(self) -> bool:
        return self._reader.in_arguments

    def _object(self, found: str) -> bool:
        """The brace belongs to the object, the tag and separators don't."""
        if found != "{":
            self.consume(len(found))
        self._reader = CallObjectReader(known_name(self.tools), call_keys_only=True)
        return self.go(self._call)

    def _call(self) -> bool:
        if not self.read_call(self._reader):
            return False
        if self._reader.failed:
            return self.reject(self._content)
        self.accept()
        return self.go(self._after_call_object)

    def _after_call_object(self) -> bool:
        if not self.consume_space():
            return False
        found = match_start(self.buffer, (self.TAG, ";", ",", "{"))
        if found == "":
            return False
        return self.reject(self._content) if found is None else self._object(found)

    def _content(self) -> bool:
        place, marker = self._FINDER.find(self.buffer)
        self.content_to(place)
        return self._object(marker) if marker else False


class RequiredCallsParser(CallListParser):
    """The array of calls that the grammar for ``tool_choice: required`` produces, whatever the model's own format is."""

    needs_special_tokens = False

    def begin(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "[":
            return self.reject(self.plain)
        self.consume(1)
        return self.go(self.first_item)

    def accepts(self, name: str) -> bool:
        return name in self.tools

    def after_list(self) -> bool:
        return self.go(self.plain)


class NamedCallParser(ToolParser):
    """The arguments object that the grammar for a named ``tool_choice`` produces: a call of the only tool there is."""

    needs_special_tokens = False

    def __init__(self, tools: Sequence[ToolSpec]):
        super().__init__(tools)
        (self._name,) = self.tools
        self._arguments = JsonReader()

    def begin(self) -> bool:
        if not self.consume_space():
            return False
        if self.buffer[0] != "{":
            return self.reject(self.plain)
        self.announce(self._name)
        return self.go(self._in_call)

    def in_arguments(self) -> bool:
        return not self._arguments.done

    def _in_call(self) -> bool:
        if not self.read_arguments(self._arguments):
            return False
        if self._arguments.failed:
            return self.reject(self.plain)
        self.accept()
        return self.go(self.plain)
