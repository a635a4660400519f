"""Forced and strict calls: random walks within the grammar give calls that parse, end in time and match the schema."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import GrammarSpec
from fastengine.text.grammar import GrammarCompiler
from fastengine.text.tokenizer import Tokenizer
from fastengine.text.tool_parsers import ToolRequest, ToolSpec, tool_request
from fastengine.text.tool_parsers.call_grammar import bounded, closed, forced_call_parser, tool_grammar
from fastengine.text.tool_parsers.lists import MistralToolParser
from fastengine.text.tool_parsers.marked import DeepSeekV31ToolParser, HermesToolParser
from tests.text.tool_parsers.parsing import calls_of, content_of, parse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9, "uniqueItems": True},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["city", "where"],
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["lat"]}},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}, {"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level)


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: GrammarSpec, seed: int, max_tokens: int) -> str:
    """Sample uniformly within the mask; ends only when nothing else may follow, as a model that never wants to end does."""
    matcher = compiler.matcher(grammar)
    row = np.zeros(compiler.num_mask_words, np.int32)
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(max_tokens):
        matcher.fill(row)
        allowed = {int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))} - set(tokenizer.eos_token_ids)
        if not allowed or matcher.is_finished:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(int(generator.choice(sorted(allowed))))
        matcher.consume(ids[-1])
    pytest.fail(f"no end after {max_tokens} tokens: {tokenizer.decode(ids)!r}")


def check_weather(arguments: dict[str, Any]) -> None:
    assert list(arguments) == [key for key in WEATHER["properties"] if key in arguments]  # type: ignore[attr-defined]
    assert {"city", "where"} <= arguments.keys()
    assert isinstance(arguments["city"], str)
    assert list(arguments["where"]) == ["lat"]
    assert 1 <= arguments.get("days", 1) <= 9


@pytest.mark.parametrize("seed", range(4))
def test_a_named_call(compiler: GrammarCompiler, byte_level: Tokenizer, seed: int) -> None:
    request = tool_request(TOOLS, {"type": "function", "function": {"name": "get_weather"}})
    grammar = tool_grammar(request, None, max_tokens=64)
    assert grammar is not None
    text = walk(compiler, byte_level, grammar, seed, 1000)
    ((name, arguments),) = calls_of(parse(forced_call_parser(request), [text]))
    assert name == "get_weather"
    assert len(arguments["city"]) <= 104
    check_weather(arguments)
    assert text.startswith('{"city": "')


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(compiler: GrammarCompiler, byte_level: Tokenizer, seed: int, parallel: bool) -> None:
    request = tool_request(TOOLS, "required", parallel)
    grammar = tool_grammar(request, HermesToolParser, max_tokens=256)
    assert grammar is not None
    result = parse(forced_call_parser(request), [walk(compiler, byte_level, grammar, seed, 5000)])
    calls = calls_of(result)
    assert content_of(result) == ""
    assert 1 <= len(calls) <= (4 if parallel else 1)
    for name, arguments in calls:
        if name == "get_weather":
            check_weather(arguments)
        else:
            assert (name, arguments) == ("now", {})


def test_any_number_of_calls_that_the_schema_allows(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = tool_grammar(tool_request(TOOLS, "required"), None)
    assert grammar is not None
    long_text = "x" * 3000
    calls = [{"name": "get_weather", "parameters": {"city": long_text, "where": {"lat": 1}}}, {"name": "now", "parameters": {}}]
    for text in (json.dumps(calls), json.dumps(calls[:1])):
        matcher = compiler.matcher(grammar, byte_level.encode(text))
        assert matcher.is_accepting
    assert not compiler.matcher(grammar, byte_level.encode("[")).is_accepting


@pytest.mark.parametrize("parser", [HermesToolParser, DeepSeekV31ToolParser])
def test_strict_tools(compiler: GrammarCompiler, byte_level: Tokenizer, parser: Any) -> None:
    strict = json.loads(json.dumps(TOOLS))
    strict[0]["function"] |= {"strict": True, "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    request = tool_request(strict)
    grammar = tool_grammar(request, parser)
    assert grammar is not None
    _, begin, end = parser.call_structure(request.tools[0])
    compiler.matcher(grammar, byte_level.encode(f'Free text. {begin}{{"n": 3}}{end} and more.'))
    with pytest.raises(ValueError, match="does not fit"):
        compiler.matcher(grammar, byte_level.encode(f'{begin}{{"n": "three"}}{end}'))
    _, begin, end = parser.call_structure(request.tools[1])
    compiler.matcher(grammar, byte_level.encode(f'{begin}{{"whatever": []}}{end}'))
    result = parse(parser(request.tools), [f'{begin}{{"whatever": []}}{end}'])
    assert calls_of(result) == [("now", {"whatever": []})]


def test_no_grammar() -> None:
    assert tool_grammar(tool_request(TOOLS), HermesToolParser) is None
    assert tool_grammar(tool_request(TOOLS, "none"), HermesToolParser) is None
    strict = ToolRequest("auto", (ToolSpec("f", {"type": "object"}, strict=True),))
    assert tool_grammar(strict, MistralToolParser) is None
    assert tool_grammar(strict, None) is None
    with pytest.raises(ValueError, match="forces no call"):
        forced_call_parser(tool_request(TOOLS))


def test_objects_are_closed_where_that_is_their_meaning() -> None:
    free = {"type": "object"}
    said = {"type": "object", "properties": {"a": free}, "additionalProperties": {"type": "string"}}
    joined = {"properties": {"a": {"type": "string"}}, "allOf": [{"properties": {"b": {"type": "string"}}}]}
    for schema in (free, said, joined):
        assert closed(schema) == schema
    nested = closed({"type": "object", "properties": {"a": {"anyOf": [{"properties": {"b": free}}, {"type": "null"}]}}})
    assert nested["additionalProperties"] is False
    assert nested["properties"]["a"]["anyOf"][0]["additionalProperties"] is False


def test_bounds_are_shared_and_respect_the_schema() -> None:
    schema = {
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array", "items": {"type": "string"}},
            "c": {"type": "string", "maxLength": 9000},
            "d": {"enum": ["x"]},
            "e": {"type": "string", "minLength": 500},
        }
    }
    properties = bounded(schema, 60)["properties"]
    assert properties["a"] == {"type": "string", "maxLength": 40}
    assert properties["b"] == {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 7}
    assert properties["c"] == {"type": "string", "maxLength": 9000}
    assert properties["d"] == {"enum": ["x"]}
    assert properties["e"]["maxLength"] == 500
