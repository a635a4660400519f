"""Reading JSON that arrives in pieces: one value, and the object in which models write a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

WHITE_SPACE = re.compile(r"[ \t\n\r]+")
SPACE_CHARACTERS = " \t\n\r"
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
LITERAL_RUN = re.compile(r"[-+.0-9A-Za-z]+")
LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# Longer numbers are refused by JSON libraries, Python's own among them.
MAX_LITERAL_CHARACTERS = 1000
MAX_DEPTH = 256
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})


class _Mode(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()


class JsonReader:
    """Checks one JSON value character by character and passes on its text as far as it is certain.

    Numbers, words and escapes come out whole. Raw control characters inside strings, which models
    write in multi-line text and JSON forbids, come out escaped. ``failed`` is set at the first
    character that can't be JSON; where that is does not depend on how the text was cut.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._mode = _Mode.VALUE
        self._in_string = False
        self._open: list[str] = []
        self._out: list[str] = []

    def feed(self, text: str, start: int = 0) -> int:
        """Read from ``text[start:]``; returns the place of the first character not consumed (to be fed again, unless done or failed)."""
        place = begun = start
        while place < len(text) and not self.done and not self.failed:
            if self._in_string and text[place] < " ":
                self._out += [text[begun:place], json.dumps(text[place])[1:-1]]
                place = begun = place + 1
                continue
            end = self._in_text(text, place) if self._in_string else self._structure(text, place)
            if end == place:
                break
            place = end
        self._out.append(text[begun:place])
        return place

    def take(self) -> str:
        """The value's text since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def _in_text(self, text: str, place: int) -> int:
        run = STRING_RUN.match(text, place)
        if run is not None:
            return run.end()
        if text[place] == '"':
            self._in_string = False
            if self._mode is _Mode.KEY:
                self._mode = _Mode.COLON
            else:
                self._value_ended()
            return place + 1
        escape = ESCAPE.match(text, place)
        if escape is not None:
            return escape.end()
        self.failed = ESCAPE_BEGINNING.match(text, place) is None
        return place

    def _structure(self, text: str, place: int) -> int:
        space = WHITE_SPACE.match(text, place)
        if space is not None:
            return space.end()
        character, mode = text[place], self._mode
        if (mode, character) in ((_Mode.FIRST_ITEM, "]"), (_Mode.FIRST_KEY, "}")):
            return self._close(place)
        if mode in (_Mode.VALUE, _Mode.FIRST_ITEM):
            return self._begin_value(text, place)
        if mode in (_Mode.KEY, _Mode.FIRST_KEY) and character == '"':
            self._mode, self._in_string = _Mode.KEY, True
            return place + 1
        if mode is _Mode.COLON and character == ":":
            self._mode = _Mode.VALUE
            return place + 1
        if mode is _Mode.AFTER and character == ",":
            self._mode = _Mode.KEY if self._open[-1] == "}" else _Mode.VALUE
            return place + 1
        if mode is _Mode.AFTER and character == self._open[-1]:
            return self._close(place)
        self.failed = True
        return place

    def _begin_value(self, text: str, place: int) -> int:
        character = text[place]
        if character == '"':
            self._mode, self._in_string = _Mode.VALUE, True
            return place + 1
        if character in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append("}" if character == "{" else "]")
            self._mode = _Mode.FIRST_KEY if character == "{" else _Mode.FIRST_ITEM
            return place + 1
        run = LITERAL_RUN.match(text, place)
        if run is None or len(run.group()) > MAX_LITERAL_CHARACTERS:
            self.failed = True
            return place
        if run.end() == len(text):
            return place  # it may go on
        if LITERAL.fullmatch(run.group()) is None:
            self.failed = True
            return place
        self._value_ended()
        return run.end()

    def _close(self, place: int) -> int:
        self._open.pop()
        self._value_ended()
        return place + 1

    def _value_ended(self) -> None:
        self._mode = _Mode.AFTER
        self.done = not self._open


class _Part(Enum):
    """What :class:`CallObjectReader` expects next in the object, or what the value it is reading is."""

    OPENING = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()


class CallObjectReader:
    """Reads ``{"name": "f", "arguments": {...}}`` in any order of keys; other keys are skipped.

    ``parameters`` means the same as ``arguments``; arguments may also be absent, null, or a string
    holding JSON (which comes out in one piece). ``ready`` says that this certainly is a call: its
    name is known and its arguments have begun, or the object has ended.
    """

    def __init__(self, accepts: Callable[[str], bool], *, call_keys_only: bool = False):
        """``accepts`` decides which names may be called; another name makes the object ``failed``.

        With ``call_keys_only`` so does any key that calls don't have: an answer that is a JSON object
        of some other kind is then known as such at its first key.
        """
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.in_arguments = False
        self._accepts = accepts
        self._call_keys_only = call_keys_only
        self._part = _Part.OPENING
        self._key = ""
        self._value: JsonReader | None = None
        self._has_arguments = False
        self._out: list[str] = []

    @property
    def ready(self) -> bool:
        return self.name is not None and (self._has_arguments or self.done)

    def take(self) -> str:
        """The arguments' text since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, text: str) -> int:
        """Returns the place of the first character not consumed (to be fed again, unless done or failed)."""
        place = 0
        while place < len(text) and not self.done and not self.failed:
            if self._value is None:
                place = self._structure(text, place)
                continue
            place = self._value.feed(text, place)
            if self.in_arguments:
                self._out.append(self._value.take())
            self.failed = self._value.failed
            if not self._value.done:
                break
            self._value_ended(self._value)
        return place

    def _structure(self, text: str, place: int) -> int:
        space = WHITE_SPACE.match(text, place)
        if space is not None:
            return space.end()
        character, part = text[place], self._part
        if part is _Part.OPENING and character == "{":
            self._part = _Part.FIRST_KEY
        elif part in (_Part.FIRST_KEY, _Part.AFTER) and character == "}":
            self._end()
        elif part in (_Part.FIRST_KEY, _Part.KEY) and character == '"':
            self._part, self._value = _Part.KEY, JsonReader()
            return place
        elif part is _Part.COLON and character == ":":
            self._part = _Part.VALUE
        elif part is _Part.AFTER and character == ",":
            self._part = _Part.KEY
        elif part is _Part.VALUE and self._may_begin(character):
            self._value = JsonReader()
            return place
        else:
            self.failed = True
        return place if self.failed else place + 1

    def _may_begin(self, character: str) -> bool:
        """Whether the current key's value may begin so; notes that the arguments begin."""
        if self._key == "name":
            return character == '"' and self.name is None
        if self._key in ARGUMENT_KEYS:
            if self._has_arguments or character not in '{"n':
                return False
            self.in_arguments = self._has_arguments = character == "{"
        return True

    def _value_ended(self, value: JsonReader) -> None:
        self._value = None
        if self._part is _Part.KEY:
            self._key = json.loads(value.take())
            self._part = _Part.COLON
            self.failed = self._call_keys_only and self._key not in CALL_KEYS
            return
        self._part = _Part.AFTER
        if self._key == "name":
            name = json.loads(value.take())
            self.failed = not name or not self._accepts(name)
            self.name = None if self.failed else name
        elif self.in_arguments:
            self.in_arguments = False
        elif self._key in ARGUMENT_KEYS:
            self._take_encoded(json.loads(value.take()))

    def _take_encoded(self, arguments: str | None) -> None:
        """Arguments that are null or a string of JSON."""
        inner = JsonReader()
        text = (arguments or "").strip(SPACE_CHARACTERS) or "{}"
        self.failed = not text.startswith("{") or inner.feed(text) < len(text) or not inner.done
        if not self.failed:
            self._has_arguments = True
            self._out.append(inner.take())

    def _end(self) -> None:
        self.done = self.name is not None
        self.failed = not self.done
        if self.done and not self._has_arguments:
            self._out.append("{}")
