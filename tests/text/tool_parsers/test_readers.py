"""The readers of single values at every split: JSON against the json module, Python literals against Python."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.text.tool_parsers.json_reader import MAX_DEPTH, JsonReader
from fastengine.text.tool_parsers.python_reader import PythonReader


def read(reader: JsonReader | PythonReader, pieces: list[str]) -> tuple[str, str, str]:
    """(text that came out, text left over, state)."""
    out, buffer = "", ""
    for piece in pieces:
        buffer += piece
        if not reader.done and not reader.failed:
            buffer = buffer[reader.feed(buffer) :]
        out += reader.take()
    return out, buffer, "done" if reader.done else "failed" if reader.failed else "open"


def read_everywhere(kind: type[JsonReader] | type[PythonReader], text: str) -> tuple[str, str, str]:
    whole = read(kind(), [text])
    assert read(kind(), list(text)) == whole
    for place in range(1, len(text)):
        assert read(kind(), [text[:place], text[place:]]) == whole
    return whole


@pytest.mark.parametrize(
    "source", ["{}", "[]", '""', '{"a": [1, -2.5e-3, true, null, "\\u00e9\\n\\\\"]}', "12 ", "-0.5,", "[[[]], {}]", '"}{"', "1E+9]"]
)
def test_json(source: str) -> None:
    out, rest, state = read_everywhere(JsonReader, source)
    assert state == "done"
    assert out + rest == source
    assert json.loads(out) == json.loads(source.rstrip(" ,") if not source.endswith("9]") else source[:-1])


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("[1, 01]", "[1, "),
        ("[1,]", "[1,"),
        ("{'a': 1}", "{"),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ('["\\x"]', '["'),
        ('["\\u12g4"]', '["'),
        ("[tru ]", "["),
        ("[NaN ]", "["),
        ("[1 2]", "[1 "),
        ("[}", "["),
        ("[" + "1" * 2000 + "]", "["),
        ("[" * (MAX_DEPTH + 1), "[" * MAX_DEPTH),
    ],
)
def test_json_that_is_none(source: str, out: str) -> None:
    assert read_everywhere(JsonReader, source) == (out, source[len(out) :], "failed")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",: \\un1-.etrfalsn0\n', max_size=16))
def test_json_agrees_with_the_json_module(source: str) -> None:
    out, rest, state = read(JsonReader(), [source + " "])
    try:
        json.loads(source)
    except ValueError:
        # Raw line breaks in strings are mended, and what follows a value is not read.
        if state == "done":
            json.loads(out)
    else:
        assert (state, out.strip(), rest.strip()) == ("done", source.strip(), "")


@pytest.mark.parametrize(
    "source",
    [
        *("'it'", '"it\'s"', "'say \"hi\"'", "''", '""', "''''''", "'''a'b''c'''", '"""two\nlines"""', "'\\'\\\"\\\\'"),
        *("'\\0'", "'\\1x'", "'\\12x'", "'\\123'", "'\\1234'", "'\\x41\\u00e9\\U0001F600'", "'\\a\\b\\f\\n\\r\\t\\v'", "'a\\\nb'", "'é😀'"),
        *("12", "-3", "+4", "1_000", "0x1F", "0o17", "0b11", "1.5", ".5", "5.", "1e3", "True", "False", "None"),
        *("[1, 2,]", "[]", "[ ]", "{}", "{'a': [None, {'b': ''}],}", "[[], [[]]]"),
    ],
)
def test_python(source: str) -> None:
    out, rest, state = read_everywhere(PythonReader, source + ")")
    assert (rest, state) == (")", "done")
    assert json.loads(out) == ast.literal_eval(source)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        *(("(1, 2))", ""), ("[1, (2)]", "[1"), ("{1: 2}", "{"), ("{'a'}", '{"a"'), ("[,]", "["), ("[1,,]", "[1"), ("r'a'", ""), ("f(x)", "")),
        *(("1j)", ""), ("1+1)", ""), ("'\\xg1'", '"'), ("'\\U00110000'", '"'), ("'\\N{DASH}'", '"'), ("[1 2]", "[1"), ("- 1)", "")),
    ],
)
def test_python_that_is_refused(source: str, out: str) -> None:
    result = read_everywhere(PythonReader, source)
    assert (result[0], result[2]) == (out, "failed")


def test_json_words_and_unknown_escapes_in_python() -> None:
    assert read_everywhere(PythonReader, "[true, false, null, '\\d+'])")[0] == '[true, false, null, "\\\\d+"]'
