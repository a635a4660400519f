"""Fields that nobody knows, inside of other fields: named in a warning, refused by --strict-fields."""

from __future__ import annotations

from typing import Any

import pytest

from fastengine.entrypoints import request_body
from fastengine.entrypoints.anthropic.message_types import MessagesBody
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CompletionRequest
from fastengine.entrypoints.openai.responses_types import ResponsesBody
from fastengine.entrypoints.sglang.generate_types import GenerateBody
from fastengine.entrypoints.unknown_fields import nested_unknown_fields
from fastengine.frontend.errors import ApiError
from tests.entrypoints.bodies import HI

SCHEMA = {"type": "object", "properties": {"zz": {"type": "string"}}}
CHAT = {"messages": HI, "max_tokens": 2}
UNKNOWN: list[tuple[Any, dict[str, Any], str]] = [
    (ChatCompletionRequest, {**CHAT, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    (ChatCompletionRequest, {**CHAT, "response_format": {"type": "text", "zz": 1}}, "response_format.zz"),
    (
        ChatCompletionRequest,
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "zz": 1}}},
        "response_format.json_schema.zz",
    ),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a", "zz": 1}]}, "messages[0].zz"),
    (ChatCompletionRequest, {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "a", "zz": 1}]}]}, "messages[1].content[0].zz"),
    (ResponsesBody, {"input": "a", "text": {"zz": 1}}, "text.zz"),
    (ResponsesBody, {"input": "a", "reasoning": {"zz": 1}}, "reasoning.zz"),
    (MessagesBody, {"messages": HI, "max_tokens": 2, "thinking": {"type": "disabled", "zz": 1}}, "thinking.zz"),
    (
        MessagesBody,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zz": 1}]}], "max_tokens": 2},
        "messages[0].content[0].zz",
    ),
]
# The caller's own objects, and what is null.
KNOWN: list[tuple[Any, dict[str, Any]]] = [
    (ChatCompletionRequest, {**CHAT, "metadata": {"zz": 1}, "chat_template_kwargs": {"zz": {"zz": 1}}}),
    (ChatCompletionRequest, {**CHAT, "tools": [{"type": "function", "function": {"name": "a", "parameters": SCHEMA, "strict": True}}]}),
    (ChatCompletionRequest, {**CHAT, "guided_json": SCHEMA}),
    (ChatCompletionRequest, {"messages": [*HI, {"role": "assistant", "content": "b", "refusal": None, "audio": None}, *HI]}),
    (MessagesBody, {"messages": HI, "max_tokens": 2, "tools": [{"name": "a", "input_schema": SCHEMA}]}),
]


@pytest.mark.parametrize(("kind", "body", "path"), UNKNOWN, ids=[path for _, _, path in UNKNOWN])
def test_one_that_nobody_knows_is_named(kind: Any, body: dict[str, Any], path: str) -> None:
    assert request_body.parse(body, kind, strict=False).warning_headers() == {"X-Fastengine-Warning": f"unknown fields ignored: {path}"}
    with pytest.raises(ApiError) as refused:
        request_body.parse(body, kind, strict=True)
    assert (refused.value.status, refused.value.param) == (400, path)


@pytest.mark.parametrize(("kind", "body"), KNOWN)
def test_the_callers_own_objects_hold_anything(kind: Any, body: dict[str, Any]) -> None:
    assert request_body.parse(body, kind, strict=True).unknown == []


def test_no_more_are_looked_for_than_are_named() -> None:
    body = {"messages": [{"role": "user", "content": "a", **{f"z{i}": 1 for i in range(1000)}}]}
    assert len(request_body.parse(body, ChatCompletionRequest, strict=False).unknown) == request_body.MAX_FIELDS_NAMED


class Unseen(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError("nobody needs to look at every token id")


@pytest.mark.parametrize(("kind", "field"), [(GenerateBody, "input_ids"), (CompletionRequest, "prompt"), (ChatCompletionRequest, "prompt_token_ids")])
def test_token_ids_are_not_walked_along(kind: Any, field: str) -> None:
    assert list(nested_unknown_fields({field: Unseen([1, 2, 3])}, kind)) == []


def test_over_http(api: Any) -> None:
    reply = api.http.post("/v1/chat/completions", json={**CHAT, "stream_options": None, "response_format": {"type": "text", "zz": 1}})
    assert reply.status_code == 200
    assert "response_format.zz" in reply.headers["X-Fastengine-Warning"]
