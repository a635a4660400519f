"""Reasoning and tool parsers in a row, and what costs nothing when nothing is configured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.text.deltas import Delta, MarkerFinder, merged
from fastengine.text.output_parser import OutputFormat, OutputParser
from fastengine.text.plugins import ParserError, load_parsers
from fastengine.text.tool_parsers import tool_request
from tests.text.tool_parsers.parsing import TOOLS, cut, parse, parse_everywhere

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
TEXT = f"<think>\nI could call <tool_call>.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"


def output_format(tool_parser: str | None = "hermes", reasoning_parser: str | None = "qwen3") -> OutputFormat:
    return OutputFormat.from_names(load_parsers(), tool_parser=tool_parser, reasoning_parser=reasoning_parser)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "text"),
    [
        ("hermes", "qwen3", TEXT),
        ("ernie-x1", "ernie-x1", f"I could call <tool_call>.\n</think>\n\n\n<response>\nOne moment.\n</response>\n{CALL}\n{CALL}\n"),
    ],
)
def test_reasoning_content_and_calls(tool_parser: str, reasoning_parser: str, text: str) -> None:
    result = parse_everywhere(lambda: output_format(tool_parser, reasoning_parser).parser(tool_request(TOOLS)), text)
    call = ("f", '{"a": "</think>"}')
    assert result == [("reasoning", "I could call <tool_call>."), ("content", "One moment."), call, call]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([TEXT, CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "{", '{"name": "f"}', "word"]), max_size=6
    ),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_any_text_at_any_cut(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    output = output_format()
    whole = parse(output.parser(tool_request(TOOLS)), [text])
    assert parse(output.parser(tool_request(TOOLS)), cut(text, cuts)) == whole
    assert parse(output.parser(tool_request(TOOLS)), list(text)) == whole


def test_one_call_only() -> None:
    parser = output_format().parser(tool_request(TOOLS, parallel_tool_calls=False))
    assert parse(parser, [TEXT])[2:] == [("f", '{"a": "</think>"}')]
    assert parser.num_tool_calls == 1


def test_calls_are_counted() -> None:
    parser = output_format().parser(tool_request(TOOLS))
    assert parser.num_tool_calls == 0
    parse(parser, [TEXT])
    assert parser.num_tool_calls == 2


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_calls_are_content(choice: Any) -> None:
    parser = output_format().parser(tool_request(TOOLS if choice else None, choice))
    assert parse(parser, [TEXT]) == [("reasoning", "I could call <tool_call>."), ("content", f"One moment.\n{CALL}\n{CALL}")]


def test_forced_calls() -> None:
    output = output_format()
    named = tool_request(TOOLS, {"type": "function", "function": {"name": "f"}})
    assert parse_everywhere(lambda: output.parser(named), '{"a": "b"}') == [("f", '{"a": "b"}')]
    required = tool_request(TOOLS, "required", parallel_tool_calls=False)
    calls = json.dumps([{"name": "f", "parameters": {}}] * 2)
    assert parse_everywhere(lambda: output.parser(required), calls) == [("f", "{}")]
    assert output.grammar(named) is not None
    assert not output.needs_special_tokens(named)


def test_nothing_configured() -> None:
    output = output_format(None, None)
    parser = output.parser(tool_request(TOOLS))
    assert parser.passthrough
    assert parser.feed("<tool_call>") == [Delta("content", "<tool_call>")]
    assert parser.feed("") == parser.finish() == []
    assert not output.needs_special_tokens(tool_request(TOOLS))
    assert not OutputParser(None, None).num_tool_calls


def test_special_tokens_are_needed_for_markers() -> None:
    assert output_format(None, "qwen3").needs_special_tokens()
    assert output_format("hermes", None).needs_special_tokens(tool_request(TOOLS))
    assert not output_format("hermes", None).needs_special_tokens(tool_request(TOOLS, "none"))


def test_unknown_names() -> None:
    with pytest.raises(ParserError, match="no tool parser 'hermez'; choose from deepseek, "):
        output_format("hermez")
    with pytest.raises(ParserError, match="no reasoning parser 'x'; choose from deepseek-r1, "):
        output_format(None, "x")


def test_merging() -> None:
    deltas = [
        Delta("content", "a"),
        Delta("content", ""),
        Delta("content", "b"),
        Delta("tool", "", 0, "id", "f"),
        Delta("tool", "{}"),
        Delta("tool", "", 1, "ie", "f"),
    ]
    assert merged(deltas) == [Delta("content", "ab"), Delta("tool", "{}", 0, "id", "f"), Delta("tool", "", 1, "ie", "f")]


def test_markers_that_begin_with_each_other_are_refused() -> None:
    for markers in (["<a", "<ab"], [""]):
        with pytest.raises(ValueError, match="may be empty or begin with another"):
            MarkerFinder(markers)
