"""Bad input is a 400 that names the caller's field, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.entrypoints.bodies import GENERATING, HI

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def alive(api):
    yield
    assert api.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def refused(api: Any, path: str, body: Any, field: str | None, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = api.http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if status == 400:
        assert error["type"] == "invalid_request_error"
    if field is not None:
        assert field in error["param"]
        assert field in error["message"]
    return error


def called(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": 1e300}, "seed"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"temperature": 1e39}, "temperature"),
    ({"stop": "x" * 1025}, "stop"),
    ({"guided_regex": "é" * 600_000}, "guided_regex"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {"²": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": 5, "stream": True}, "stream_options"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [258]}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ({"prompt_token_ids": ["a"]}, "prompt_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "a\r\nb: c"}, "request_id"),
    ({"priority": 2**40}, "priority"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"max_streaming_response_tokens": 0}, "max_streaming_response_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_grammar": "root ::= "}, "guided_grammar"),
    ({"structural_tag": {}}, "structural_tag"),
    ({"structural_tag": "{"}, "structural_tag"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": None}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"stop": ["a", "\ud800"]}, "stop[1]"),
    ({"guided_regex": "\ud800"}, "guided_regex"),
    ({"guided_choice": ["\ud800"]}, "guided_choice[0]"),
    ({"guided_json": {"enum": ["\ud800"]}}, "guided_json.enum[0]"),
    ({"guided_json": '{"enum": ["\\ud800"]}'}, "guided_json"),
    ({"user": "\ud800"}, "user"),
    ({"request_id": "\ud800"}, "request_id"),
    ({"temperature": float("nan")}, "temperature"),
    ({"logit_bias": {"5": float("inf")}}, "logit_bias.5"),
]
CHAT_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
    ({"messages": [*HI, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1].content"),
    ({"messages": [*HI, called({})]}, "messages[1].tool_calls[0].function"),
    ({"messages": [*HI, called({"function": {"arguments": "{}"}})]}, "messages[1].tool_calls[0].function.name"),
    ({"messages": [*HI, called({"function": {"name": "f", "arguments": 5}})]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*HI, called({"function": {"name": "f", "arguments": "{"}})]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*HI, called({"function": {"name": "f", "arguments": '"\\ud800"'}})]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*HI, called({"type": "custom", "custom": {"name": "f"}})]}, "messages[1].tool_calls[0].type"),
    ({"messages": [*HI, called({"id": 5, "function": {"name": "f"}})]}, "messages[1].tool_calls[0].id"),
    ({"messages": [*HI, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]}, "messages[1].function_call"),
    ({"messages": [*HI, {"role": "user", "content": "a\ud800"}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]}, "messages[1].content[0].text"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}], "tool_choice": "none"}, "tools[0].function.description"),
    ({"chat_template": ""}, "chat_template"),
    ({"chat_template": "{{ '' }}"}, "chat_template"),
    ({"chat_template": "{{ '\\ud800' }}"}, "chat_template"),
    ({"chat_template_kwargs": {"a": {"b": ["\ud800"]}}}, "chat_template_kwargs.a.b[0]"),
    ({"continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}], "chat_template": "x"}, "continue_final_message"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"prompt_token_ids": [[1]]}, "prompt_token_ids"),
    ({"chat_template": "{% if %}"}, "chat_template"),
    ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # the server has no --tool-call-parser
    ({"tools": [{"type": "function", "function": {"name": "f g"}}], "tool_choice": "required"}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}], "tool_choice": "required"},
        "tools",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}], "guided_json": {}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_max_tokens": 5}, "reasoning_max_tokens"),
    ({"reasoning_max_tokens": 0}, "reasoning_max_tokens"),
    ({"audio": {}}, "audio"),
    ({"documents": [{}]}, "documents"),
    ({"prediction": {}}, "prediction"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
]
COMPLETION_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, [6]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[5, "a"]]}, "prompt"),
    ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": ["x"] * 33, "n": 1, "best_of": 128}, "prompt"),
    ({"prompt": ["x", "y" * 5000]}, "prompt[1]"),
    ({"prompt": ["x", ""]}, "prompt[1]"),
    ({"prompt": [[1], [999]]}, "prompt[1]"),
    ({"prompt": ["x", "\ud800"]}, "prompt[1]"),
    ({"max_tokens": 10**6}, "max_tokens"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES + CHAT_CHANGES, ids=str)
def test_chat(api, change, field):
    refused(api, CHAT, {"messages": HI, "max_tokens": 4, **change}, field)


@pytest.mark.parametrize(("change", "field"), CHANGES + COMPLETION_CHANGES, ids=str)
def test_completions(api, change, field):
    refused(api, COMPLETIONS, {"prompt": "hi", "max_tokens": 4, **change}, field)


BROKEN = [b"", b" ", b"{", b"[]", b"null", b"5", b'"x"', b'{"model": 5}', b"\xff\xfe", b'{"a":"\xff"}', b'{"a":' * 5000, b"[" * 100_000, b'{"n": NaN}', b'{"a": 1e999}', b"{} {}", b'{"a":"\\ud800"}']  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/pause", "/v1/abort_requests"])
@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:12]))
def test_broken_bodies(api, path, body):
    reply = api.http.post(path, content=body, headers={"content-type": "application/json"})
    if path == "/v1/pause" and not body.strip():
        assert reply.status_code == 200
        api.http.post("/v1/resume")
        return
    assert reply.status_code == 400, reply.text
    assert "error" in reply.json()


def test_too_long_prompts_name_the_numbers(api):
    error = refused(api, COMPLETIONS, {"prompt": [5] * 200_000, "max_tokens": 2}, "prompt")
    assert "200000" in error["message"]
    assert "4096" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = refused(api, COMPLETIONS, {"prompt": [5] * 4090, "max_tokens": 7}, "max_tokens")
    assert "4090" in error["message"]
    assert "4097" in error["message"]
    assert api.http.post(COMPLETIONS, json={"prompt": [5] * 4090, "max_tokens": 6}).status_code == 200
    # OpenAI's default is no limit of the caller's.
    reply = api.http.post(COMPLETIONS, json={"prompt": [5] * 4090}).json()
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (6, "length")


def test_unknown_model(api):
    error = refused(api, CHAT, {"model": "other", "messages": HI}, "model", 404)
    assert error["code"] == "model_not_found"
    assert api.http.get("/v1/models/other").status_code == 404


def test_unknown_paths_and_methods(api):
    reply = api.http.post("/v1/no_such_method", json={})
    assert reply.status_code == 404
    assert "/v1/no_such_method" in reply.json()["error"]["message"]
    reply = api.http.get(CHAT)
    assert reply.status_code == 405
    assert reply.json()["error"]["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


def test_unknown_fields_are_named_in_a_warning(api):
    for stream in (False, True):
        reply = api.http.post(CHAT, json={"messages": HI, "max_tokens": 1, "stream": stream, "temprature": 1, "x\r\nEvil: 1": 2})
        assert reply.status_code == 200
        assert "temprature" in reply.headers["x-fastengine-warning"]
        assert "evil" not in reply.headers
    assert "x-fastengine-warning" not in api.http.post(CHAT, json={"messages": HI, "max_tokens": 1}).headers


def test_strict_fields_refuses_unknown_ones(start_server):
    server = start_server(strict_fields=True)
    reply = server.http.post(CHAT, json={"messages": HI, "max_tokens": 1, "temprature": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temprature"
    assert server.http.post(CHAT, json={"messages": HI, "max_tokens": 1, "tools": None}).status_code == 200


def test_body_limit(start_server):
    server = start_server(max_body_mib=0.01)
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    assert server.http.post(COMPLETIONS, content=body).status_code == 413
    reply = server.http.post(COMPLETIONS, content=iter([body[:5000]] * 4))  # chunked: no length is announced
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"
    assert server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/completions", "prompt"),
        ("/generate", "text"),
        ("/generate", "input_ids"),
        ("/v1/embeddings", "input"),
        ("/v1/score", "text_2"),
        ("/v1/score", "documents"),
        ("/v1/rerank", "documents"),
    ],
)
def test_more_texts_than_a_request_may_have_never_wait_for_the_tokenizer(api, path, param):
    """There they would fill the queue, and others be told that it is full."""
    body = {**GENERATING[path], param: [[5]] * 9000 if param == "input_ids" else ["a"] * 9000}
    if path == "/generate":
        body = {param: body[param]}
    elif param == "documents":
        body.pop("text_2", None)
    reply = api.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
