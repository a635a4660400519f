"""Reading a Python literal that arrives in pieces, as the JSON it means."""

from __future__ import annotations

import ast
import json
import math
import re
from enum import Enum, auto

from fastengine.text.tool_parsers.json_reader import LITERAL, MAX_DEPTH, MAX_LITERAL_CHARACTERS, WHITE_SPACE

TEXT_RUN = re.compile(r"""[^\\'"\x00-\x1f]+""")
ESCAPE = re.compile(r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuUN0-7])""", re.DOTALL)
# Only an octal escape can be complete and yet go on.
UNFINISHED_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?\Z")
SIMPLE_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
LITERAL_RUN = re.compile(r"[-+.0-9A-Za-z_]+")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class _Mode(Enum):
    VALUE = auto()
    ITEM = auto()  # or the end of the list
    KEY = auto()  # or the end of the dictionary
    COLON = auto()
    AFTER = auto()


class PythonReader:
    """Turns one value of strings, numbers, ``True``, ``False``, ``None``, lists and dictionaries into JSON.

    JSON's own words are understood too. Tuples, sets, prefixes of strings, joined strings and
    expressions are not: ``failed`` is set where they begin.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._mode = _Mode.VALUE
        self._quote = ""
        self._open: list[str] = []
        self._comma = False
        self._out: list[str] = []

    def feed(self, text: str) -> int:
        """Returns the place of the first character not consumed (to be fed again, unless done or failed)."""
        place = 0
        while place < len(text) and not self.done and not self.failed:
            end = self._in_text(text, place) if self._quote else self._structure(text, place)
            if end == place:
                break
            place = end
        return place

    def take(self) -> str:
        """The value's JSON since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def _in_text(self, text: str, place: int) -> int:
        run = TEXT_RUN.match(text, place)
        if run is not None:
            self._out.append(run.group())
            return run.end()
        if text[place] == "\\":
            return self._escape(text, place)
        if text[place] != self._quote[0]:
            return self._character(text[place], place + 1)
        if text.startswith(self._quote, place):
            return self._text_ended(place + len(self._quote))
        if self._quote.startswith(text[place:]):
            return place  # it may become the closing quotes
        return self._character(text[place], place + 1)

    def _escape(self, text: str, place: int) -> int:
        if UNFINISHED_ESCAPE.match(text, place):
            return place
        match = ESCAPE.match(text, place)
        if match is None:
            self.failed = True
            return place
        body = match.group()[1:]
        if body[0] in "01234567":
            return self._character(chr(int(body, 8)), match.end())
        if body[0] in "xuU":
            code = int(body[1:], 16)
            self.failed = code > 0x10FFFF
            return place if self.failed else self._character(chr(code), match.end())
        # Python keeps the backslash of an escape it doesn't know.
        return self._character(SIMPLE_ESCAPES.get(body, "\\" + body), match.end())

    def _character(self, meaning: str, end: int) -> int:
        self._out.append(json.dumps(meaning)[1:-1])
        return end

    def _text_ended(self, end: int) -> int:
        self._quote = ""
        self._out.append('"')
        if self._mode is _Mode.KEY:
            self._mode = _Mode.COLON
        else:
            self._value_ended()
        return end

    def _structure(self, text: str, place: int) -> int:
        space = WHITE_SPACE.match(text, place)
        if space is not None:
            return space.end()
        character, mode = text[place], self._mode
        if self._open and character == self._open[-1] and mode in (_Mode.ITEM, _Mode.KEY, _Mode.AFTER):
            self._open.pop()
            self._out.append(character)
            self._value_ended()
            return place + 1
        if mode is _Mode.KEY and character in "'\"":
            return self._begin_text(text, place)
        if mode in (_Mode.VALUE, _Mode.ITEM):
            return self._begin_value(text, place)
        if mode is _Mode.COLON and character == ":":
            self._mode = _Mode.VALUE
            self._out.append(": ")
            return place + 1
        if mode is _Mode.AFTER and character == ",":
            # Python may end a list with a comma, JSON may not: it is written with what follows.
            self._comma = True
            self._mode = _Mode.KEY if self._open[-1] == "}" else _Mode.ITEM
            return place + 1
        self.failed = True
        return place

    def _begin_value(self, text: str, place: int) -> int:
        character = text[place]
        if character in "'\"":
            return self._begin_text(text, place)
        if character in "[{" and len(self._open) < MAX_DEPTH:
            self._write(character)
            self._open.append("]" if character == "[" else "}")
            self._mode = _Mode.ITEM if character == "[" else _Mode.KEY
            return place + 1
        run = LITERAL_RUN.match(text, place)
        if run is None or len(run.group()) > MAX_LITERAL_CHARACTERS:
            self.failed = True
            return place
        if run.end() == len(text):
            return place  # it may go on
        value = json_literal(run.group())
        if value is None:
            self.failed = True
            return place
        self._write(value)
        self._value_ended()
        return run.end()

    def _begin_text(self, text: str, place: int) -> int:
        quote = text[place]
        if text[place : place + 3] in (quote, quote * 2) and len(text) < place + 3:
            return place  # one, two or three quotes
        self._quote = quote * 3 if text.startswith(quote * 3, place) else quote
        self._write('"')
        return place + len(self._quote)

    def _write(self, text: str) -> None:
        if self._comma:
            self._out.append(", ")
            self._comma = False
        self._out.append(text)

    def _value_ended(self) -> None:
        self._mode = _Mode.AFTER
        self._comma = False
        self.done = not self._open


def json_literal(text: str) -> str | None:
    """A number or word of Python (``0x1F``, ``1_000``, ``None``) as JSON, or None if it is neither."""
    if text in WORDS:
        return WORDS[text]
    if LITERAL.fullmatch(text):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if is_number and math.isfinite(value) else None
