"""Which parsers there are by name: the built-in ones, and those of ``--tool-parser-plugin`` files.

A plug-in is a Python file with a function that is given the table to add to::

    from fastengine.text.tool_parsers import ToolParser

    class MyParser(ToolParser):
        def begin(self) -> bool: ...

    def register(parsers):
        parsers.add_tool_parser("mine", MyParser)
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from fastengine.text.reasoning_parsers.base import ReasoningParser
from fastengine.text.reasoning_parsers.think_tags import (
    DeepSeekR1ReasoningParser,
    Ernie45VLReasoningParser,
    ErnieX1ReasoningParser,
    Qwen3ReasoningParser,
)
from fastengine.text.tool_parsers.base import ToolParser
from fastengine.text.tool_parsers.lists import LlamaJsonToolParser, MistralToolParser
from fastengine.text.tool_parsers.marked import (
    DeepSeekToolParser,
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    ErnieX1ToolParser,
    HermesToolParser,
)
from fastengine.text.tool_parsers.pythonic import PythonicToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen": HermesToolParser,
    "llama3-json": LlamaJsonToolParser,
    "mistral": MistralToolParser,
    "deepseek": DeepSeekToolParser,
    "deepseek-v3": DeepSeekV3ToolParser,
    "deepseek-v31": DeepSeekV31ToolParser,
    "ernie-x1": ErnieX1ToolParser,
    "ernie-45-vl-thinking": ErnieX1ToolParser,
    "pythonic": PythonicToolParser,
}
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek-r1": DeepSeekR1ReasoningParser,
    "qwen3": Qwen3ReasoningParser,
    "ernie": ErnieX1ReasoningParser,
    "ernie-x1": ErnieX1ReasoningParser,
    "ernie-45-vl": Ernie45VLReasoningParser,
    "ernie-45-vl-thinking": Ernie45VLReasoningParser,
}


class ParserError(ValueError):
    """A parser's name is unknown, or a plug-in can't be used; the message says what to do."""


class Parsers:
    """The parsers by name. Names are the same with underscores and hyphens, in capitals and not."""

    def __init__(self) -> None:
        self._tool_parsers = dict(TOOL_PARSERS)
        self._reasoning_parsers = dict(REASONING_PARSERS)

    def tool_parser(self, name: str) -> type[ToolParser]:
        """Raises ParserError if there is none of that name."""
        return _found(name, self._tool_parsers, "tool parser")

    def reasoning_parser(self, name: str) -> type[ReasoningParser]:
        """Raises ParserError if there is none of that name."""
        return _found(name, self._reasoning_parsers, "reasoning parser")

    def add_tool_parser(self, name: str, parser: type[ToolParser]) -> None:
        """Raises ParserError if the name is taken or the class no :class:`ToolParser`."""
        _add(name, parser, self._tool_parsers, ToolParser)

    def add_reasoning_parser(self, name: str, parser: type[ReasoningParser]) -> None:
        """Raises ParserError if the name is taken or the class no :class:`ReasoningParser`."""
        _add(name, parser, self._reasoning_parsers, ReasoningParser)

    def add_plugin(self, path: str | Path) -> None:
        """Run a plug-in's file and its ``register``. Raises ParserError."""
        file = Path(path)
        if not file.is_file():
            raise ParserError(f"tool parser plug-in {file}: there is no such file")
        module_name = f"fastengine_plugin_{file.stem}"
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ParserError(f"tool parser plug-in {file}: the file's name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickling look a class's module up
        before = len(self._tool_parsers) + len(self._reasoning_parsers)
        try:
            spec.loader.exec_module(module)
            register = vars(module).get("register")
            if not callable(register):
                raise ParserError("it has no function 'register(parsers)'")
            register(self)
        except ParserError as error:
            raise ParserError(f"tool parser plug-in {file}: {error}") from error
        except Exception as error:  # whatever is wrong with somebody's file, start-up must say what and where
            raise ParserError(f"tool parser plug-in {file}: {_where(error, file)}{type(error).__name__}: {error}") from error
        if len(self._tool_parsers) + len(self._reasoning_parsers) == before:
            raise ParserError(f"tool parser plug-in {file}: its 'register' added no parser")


def load_parsers(plugins: Iterable[str | Path] = ()) -> Parsers:
    """The built-in parsers and those of the plug-ins. Raises ParserError."""
    parsers = Parsers()
    for path in plugins:
        parsers.add_plugin(path)
    return parsers


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def _found(name: str, table: dict[str, type], kind: str) -> type:
    found = table.get(_key(name))
    if found is None:
        raise ParserError(f"there is no {kind} {name!r}; choose from {', '.join(sorted(table))}")
    return found


def _add(name: str, parser: type, table: dict[str, type], base: type) -> None:
    if not isinstance(parser, type) or not issubclass(parser, base):
        raise ParserError(f"parser {name!r} must be a class derived from {base.__name__}, got {parser!r}")
    if _key(name) in table:
        raise ParserError(f"there is another parser of the name {name!r}")
    table[_key(name)] = parser


def _where(error: Exception, file: Path) -> str:
    """``line N: `` of the plug-in's own line that failed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file and frame.lineno is not None]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        lines.append(error.lineno)
    return f"line {lines[-1]}: " if lines else ""
