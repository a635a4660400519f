"""Grammars that make a model call tools: what ``tool_choice`` forces, and what ``strict`` tools promise.

A forced call is written without regard to the model's own format and read back by the parser of
:func:`forced_call_parser`: a named function as its arguments object alone, ``required`` as
``[{"name": ..., "parameters": {...}}, ...]``. The JSON has the spaces of ``json.dumps`` and no others:
that is what models have seen most, and leaves none of them a way to go on with white space for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastengine.protocol.requests import GrammarSpec
from fastengine.text.tool_parsers.base import ToolParser
from fastengine.text.tool_parsers.lists import NamedCallParser, RequiredCallsParser
from fastengine.text.tool_parsers.request import ToolRequest, ToolSpec

# Tools' schemas come from many generators: keywords that can't be enforced must not make a call impossible.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
MAX_CALLS = 16
# Up to this many tokens a call cut off in the middle is the likelier fault than a text cut short.
SMALL_BUDGET_TOKENS = 256
CALL_OVERHEAD_TOKENS = 12
# Text has about four characters a token: half of the budget goes to the texts at most.
CHARACTERS_PER_TOKEN = 2
MIN_TEXT_CHARACTERS = 16
TOKENS_PER_ITEM = 8
# Beside these, ``additionalProperties: false`` would forbid what they add.
COMBINING_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "patternProperties", "dependentSchemas", "unevaluatedProperties"})
SCHEMA_KEYWORDS = ("items", "additionalProperties", "not")
SCHEMA_LIST_KEYWORDS = ("prefixItems", "anyOf", "oneOf")
SCHEMA_MAP_KEYWORDS = ("properties", "$defs", "definitions", "patternProperties")


def tool_grammar(request: ToolRequest, parser: type[ToolParser] | None, *, max_tokens: int | None = None) -> GrammarSpec | None:
    """The grammar of an answer to ``request``, or None if any text will do.

    ``parser`` is the model's configured tool parser: in ``auto`` mode the calls of a request with strict
    tools are held to their schemas if the parser's format can be. ``max_tokens`` of a small budget bounds
    texts and lists that the schema leaves unbounded, so that the call ends within it.
    """
    if request.mode == "auto":
        return _strict_grammar(request, parser)
    if request.mode == "none":
        return None
    budget = max_tokens if max_tokens is not None and max_tokens <= SMALL_BUDGET_TOKENS else None
    if request.mode == "named":
        return GrammarSpec("lark", f"start: %json {_arguments_schema(request.tools[0], budget)}\n")
    return GrammarSpec("lark", _required_grammar(request, budget))


def forced_call_parser(request: ToolRequest) -> ToolParser:
    """The parser for what :func:`tool_grammar` makes of a forced call. Raises ValueError if ``request`` forces none."""
    if not request.forced:
        raise ValueError(f"tool_choice {request.mode!r} forces no call")
    return NamedCallParser(request.tools) if request.mode == "named" else RequiredCallsParser(request.tools)


def _required_grammar(request: ToolRequest, budget: int | None) -> str:
    further = (MAX_CALLS if budget is None else max(1, budget // 64)) - 1 if request.parallel else 0
    lines = ['start: "[" call (", " call)' + f'{{0,{further}}} "]"' if further else 'start: "[" call "]"']
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(request.tools))))
    for i, tool in enumerate(request.tools):
        opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
        lines += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {_arguments_schema(tool, budget)}"]
    return "\n".join(lines) + "\n"


def _arguments_schema(tool: ToolSpec, budget: int | None) -> str:
    schema = closed(tool.parameters)
    if budget is not None:
        schema = bounded(schema, budget - CALL_OVERHEAD_TOKENS)
    schema.setdefault("type", "object")
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with ``additionalProperties: false`` on every object that lists its properties and does not speak of others."""
    out = mapped(schema, closed)
    if "properties" in out and "additionalProperties" not in out and not COMBINING_KEYWORDS & out.keys():
        out["additionalProperties"] = False
    return out


def bounded(schema: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """The schema with bounds on its unbounded texts and lists, such that filling them takes about ``num_tokens``."""
    share = max(MIN_TEXT_CHARACTERS, num_tokens * CHARACTERS_PER_TOKEN // max(1, count_unbounded_texts(schema)))
    items = max(1, num_tokens // TOKENS_PER_ITEM)

    def bound(part: Mapping[str, Any]) -> dict[str, Any]:
        out = mapped(part, bound)
        if is_unbounded_text(out):
            out["maxLength"] = max(share, out.get("minLength", 0))
        if out.get("type") == "array" and "maxItems" not in out:
            out["maxItems"] = max(items, out.get("minItems", 0))
        return out

    return bound(schema)


def is_unbounded_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not {"maxLength", "enum", "const", "pattern", "format"} & schema.keys()


def count_unbounded_texts(schema: Mapping[str, Any]) -> int:
    count = int(is_unbounded_text(schema))

    def visit(part: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += is_unbounded_text(part)
        return mapped(part, visit)

    mapped(schema, visit)
    return count


def mapped(schema: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """A copy of the schema with ``change`` applied to the schemas directly in it (``allOf``'s aside: they only mean something together)."""
    out = dict(schema)
    for keyword in SCHEMA_KEYWORDS:
        if isinstance(out.get(keyword), Mapping):
            out[keyword] = change(out[keyword])
    for keyword in SCHEMA_LIST_KEYWORDS:
        if isinstance(out.get(keyword), list):
            out[keyword] = [change(part) if isinstance(part, Mapping) else part for part in out[keyword]]
    for keyword in SCHEMA_MAP_KEYWORDS:
        if isinstance(out.get(keyword), Mapping):
            out[keyword] = {name: change(part) if isinstance(part, Mapping) else part for name, part in out[keyword].items()}
    return out


def _strict_grammar(request: ToolRequest, parser: type[ToolParser] | None) -> GrammarSpec | None:
    """Free text in which every call is one of the tools, its arguments held to the schema where the tool is strict."""
    if parser is None or not any(tool.strict for tool in request.tools):
        return None
    structures, triggers = [], set()
    for tool in request.tools:
        structure = parser.call_structure(tool)
        if structure is None:
            return None
        trigger, begin, end = structure
        triggers.add(trigger)
        structures.append({"begin": begin, "schema": dict(tool.parameters) if tool.strict else {"type": "object"}, "end": end})
    return GrammarSpec("structural_tag", json.dumps({"structures": structures, "triggers": sorted(triggers)}))
