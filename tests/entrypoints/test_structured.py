"""Fields that shape an answer: each becomes one grammar for the engine, however it is spelled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastengine.protocol.requests import GrammarSpec
from tests.frontend.harness import say

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
AS_SCHEMA = GrammarSpec("json_schema", json.dumps(SCHEMA))
FIELDS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", "")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, AS_SCHEMA),
    ({"response_format": {"type": "structural_tag", **TAGS}}, GrammarSpec("structural_tag", json.dumps(TAGS))),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, AS_SCHEMA),
    ({"guided_json_object": True}, GrammarSpec("json_object", "")),
    ({"guided_json_object": False}, None),
    ({"guided_regex": "[ab]+"}, GrammarSpec("regex", "[ab]+")),
    ({"guided_choice": ["yes", "nö"]}, GrammarSpec("choice", '["yes", "nö"]')),
    ({"guided_grammar": 'root ::= "a" | "b"'}, GrammarSpec("lark", 'root ::= "a" | "b"')),
    ({"structural_tag": TAGS}, GrammarSpec("structural_tag", json.dumps(TAGS))),
    ({"structural_tag": json.dumps(TAGS)}, GrammarSpec("structural_tag", json.dumps(TAGS))),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object", "")),
    ({"structured_outputs": {"regex": "a"}}, GrammarSpec("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec("choice", '["a"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec("lark", 'start: "a"')),
    ({"structured_outputs": {"structural_tag": TAGS}}, GrammarSpec("structural_tag", json.dumps(TAGS))),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_engine_gets_the_grammar(api, path, fields, expected):
    api.engine.script = say("x")
    api.engine.generated.clear()
    given = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    reply = api.http.post(path, json={**given, **fields})
    assert reply.status_code == 200, reply.text
    (request,) = api.engine.generated
    assert request.sampling.grammar == expected
    assert request.sampling.reasoning is None
