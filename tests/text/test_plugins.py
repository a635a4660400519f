"""Plug-ins: parsers from a file, and errors that say which file, which line and why."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from fastengine.text.output_parser import OutputFormat
from fastengine.text.plugins import ParserError, load_parsers
from fastengine.text.tool_parsers import tool_request
from tests.text.tool_parsers.parsing import TOOLS, parse_everywhere

PLUGIN = '''
from fastengine.text.deltas import Delta, MarkerFinder
from fastengine.text.reasoning_parsers import ReasoningParser
from fastengine.text.tool_parsers import ToolParser

BANG = MarkerFinder(["!"])


class BangParser(ToolParser):
    """``!name`` and a space call a tool without arguments."""

    def begin(self) -> bool:
        place, marker = BANG.find(self.buffer)
        self.content_to(place)
        return bool(marker) and self.go(self.name)

    def name(self) -> bool:
        name, space, _ = self.buffer[1:].partition(" ")
        if not space:
            return False
        self.consume(len(name) + 2)
        if name not in self.tools:
            return self.reject(self.begin)
        self.announce(name)
        self.arguments("{}")
        self.accept()
        return self.go(self.begin)


class Silent(ReasoningParser):
    def feed(self, text):
        return [Delta("reasoning", text)]

    def finish(self):
        return []


def register(parsers):
    parsers.add_tool_parser("bang", BangParser)
    parsers.add_reasoning_parser("silent", Silent)
'''


def write(directory: Path, source: str) -> Path:
    path = directory / "my_parsers.py"
    path.write_text(textwrap.dedent(source))
    return path


def test_a_plugin(tmp_path: Path) -> None:
    parsers = load_parsers([write(tmp_path, PLUGIN)])
    output = OutputFormat.from_names(parsers, tool_parser="bang", reasoning_parser=None)
    result = parse_everywhere(lambda: output.parser(tool_request(TOOLS)), "Well, !f and !g not !get_weather ")
    assert result == [("content", "Well,"), ("f", "{}"), ("content", "and !g not"), ("get_weather", "{}")]
    assert parsers.reasoning_parser("silent").__name__ == "Silent"
    # A plug-in belongs to the table it was added to.
    with pytest.raises(ParserError):
        load_parsers().tool_parser("bang")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "it has no function 'register"),
        ("def register(parsers):\n    pass\n", "added no parser"),
        ("import no_such_module_anywhere\n", "line 1: ModuleNotFoundError"),
        ("x = 1\ndef broken(:\n", "line 2: SyntaxError"),
        ("def register(parsers):\n    x = 1\n    x.y\n", "line 3: AttributeError"),
        ("def register(parsers):\n    parsers.add_tool_parser('x', int)\n", "must be a class derived from ToolParser"),
        (PLUGIN.replace('"bang"', '"HERMES"'), "another parser of the name 'HERMES'"),
    ],
)
def test_errors(tmp_path: Path, source: str, message: str) -> None:
    path = write(tmp_path, source)
    with pytest.raises(ParserError, match=message) as caught:
        load_parsers([path])
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ParserError, match="no such file"):
        load_parsers([tmp_path / "none.py"])
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ParserError, match=r"must end in \.py"):
        load_parsers([tmp_path / "text.txt"])
