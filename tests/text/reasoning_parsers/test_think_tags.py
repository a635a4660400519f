"""Reasoning parsers at every split, with the prompt deciding where the answer starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.text.plugins import REASONING_PARSERS, load_parsers
from fastengine.text.reasoning_parsers import ReasoningContext, ReasoningParser
from tests.text.tool_parsers.parsing import cut, parse, parse_everywhere

OPEN = ReasoningContext(prompt="<|assistant|><think>\n")
CLOSED = ReasoningContext(prompt="<|assistant|>\n<think>\n\n</think>\n\n")
SILENT = ReasoningContext()
OFF = ReasoningContext(enable_thinking=False)
FRAGMENTS = ["<think>", "</think>", "<response>", "</response>", "<tool_call>", "\n", "\n\n", " ", "<", "a", "word", "</", "think>", "<<think>"]


def make(name: str, context: ReasoningContext) -> ReasoningParser:
    return load_parsers().reasoning_parser(name)(context)


@pytest.mark.parametrize(
    ("name", "context", "text", "expected"),
    [
        ("qwen3", SILENT, "<think>\nI see.\n</think>\n\nYes.", [("reasoning", "I see."), ("content", "Yes.")]),
        ("qwen3", SILENT, "\n<think>I see.</think>Yes.\n", [("reasoning", "I see."), ("content", "Yes.\n")]),
        ("qwen3", OPEN, "I see.\n</think>\n\nYes.", [("reasoning", "I see."), ("content", "Yes.")]),
        ("qwen3", CLOSED, "Yes.", [("content", "Yes.")]),
        ("qwen3", OFF, " Yes.\n", [("content", " Yes.\n")]),
        ("qwen3", SILENT, "No tags </think> at all", [("content", "No tags </think> at all")]),
        ("qwen3", SILENT, "<think>\n\n</think>\n\nYes.", [("content", "Yes.")]),
        ("qwen3", SILENT, "<think>a</think>Say <think> or </think>.", [("reasoning", "a"), ("content", "Say <think> or </think>.")]),
        ("qwen3", SILENT, "<think>cut of</thi", [("reasoning", "cut of</thi")]),
        ("qwen3", SILENT, "<thin", [("content", "<thin")]),
        ("qwen3", SILENT, "", []),
        ("deepseek-r1", SILENT, "I see.\n\nWell.\n</think>\n\nYes.", [("reasoning", "I see.\n\nWell."), ("content", "Yes.")]),
        ("deepseek-r1", SILENT, "<think>\nI see.</think>Yes.", [("reasoning", "I see."), ("content", "Yes.")]),
        ("deepseek-r1", ReasoningContext(prompt="<｜Assistant｜></think>"), "Yes.", [("content", "Yes.")]),
        ("deepseek-r1", SILENT, "all of it is thought\n", [("reasoning", "all of it is thought\n")]),
        ("ernie-45-vl", SILENT, "I see.</think>\nYes.", [("reasoning", "I see."), ("content", "Yes.")]),
        ("ernie-45-vl", CLOSED, "Yes.", [("content", "Yes.")]),
        ("ernie-x1", OPEN, "I see.\n</think>\n\n\n<response>\nYes.\nNo.\n</response>\n", [("reasoning", "I see."), ("content", "Yes.\nNo.")]),
        (
            "ernie-x1",
            OPEN,
            "I see.\n</think>\n\n\n<tool_call>\n{}\n</tool_call>\n",
            [("reasoning", "I see."), ("content", "<tool_call>\n{}\n</tool_call>\n")],
        ),
        ("ernie-x1", OFF, "<response>\nYes.\n</response>", [("content", "Yes.")]),
        ("ernie-x1", OPEN, "a</think>b <response>", [("reasoning", "a"), ("content", "b <response>")]),
        ("ernie-x1", OPEN, "a</think><response>cut </resp", [("reasoning", "a"), ("content", "cut </resp")]),
    ],
)
def test_known_texts(name: str, context: ReasoningContext, text: str, expected: list[Any]) -> None:
    assert parse_everywhere(lambda: make(name, context), text) == expected


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    context=st.sampled_from([OPEN, CLOSED, SILENT, OFF]),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
def test_any_text_at_any_cut(name: str, parts: list[str], context: ReasoningContext, cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(make(name, context), [text])
    assert parse(make(name, context), cut(text, cuts)) == whole
    assert parse(make(name, context), list(text)) == whole
    assert "".join(piece for _, piece in whole).count("word") == text.count("word")


def test_reasoning_is_not_held_back() -> None:
    parser = make("qwen3", OPEN)
    assert [delta.text for delta in parser.feed("first")] == ["first"]
    assert [delta.text for delta in parser.feed(" second\n")] == [" second"]
    assert [delta.text for delta in parser.feed("third <")] == ["\nthird "]


def test_white_space_without_end_is_not_held_back_for_ever() -> None:
    text = " " * 500
    parser = make("qwen3", SILENT)
    assert sum(len(delta.text) for delta in parser.feed(text)) > 400
    assert parse_everywhere(lambda: make("qwen3", SILENT), text) == [("content", text)]
