"""What every request that runs the model can say: heard by each endpoint, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from fastengine.protocol.outputs import INVALID_GRAMMAR, EngineError
from fastengine.protocol.requests import GenerateRequest
from tests.entrypoints.bodies import GENERATING, HI

ROUTES = pytest.mark.parametrize("path", list(GENERATING))


def message_and_param(reply: Any) -> tuple[str, str | None]:
    """Of an error in either API's shape; Anthropic's says the field in its message alone."""
    error = reply.json()["error"]
    return error["message"], error.get("param", error["message"].split(":")[0])


@ROUTES
def test_they_reach_the_engine(api: Any, path: str) -> None:
    said = {"request_id": f"mine{path}", "priority": -3, "timeout_s": 7.5, "cache_salt": "salt", "user": "u", "metadata": {"a": "b"}}
    count = len(api.engine.generated)
    reply = api.http.post(path, json={**GENERATING[path], **said})
    # The fake engine pools nothing: an embedding fails after it was asked for.
    assert reply.status_code == (500 if path == "/v1/embeddings" else 200), reply.text
    assert "x-fastengine-warning" not in reply.headers
    heard: GenerateRequest
    (heard,) = api.engine.generated[count:]
    assert (heard.request_id, heard.priority, heard.timeout_s, heard.cache_salt) == (f"mine{path}", -3, 7.5, "salt")


@ROUTES
@pytest.mark.parametrize(("field", "value"), [("request_id", "a b"), ("priority", 2**40), ("timeout_s", 0), ("cache_salt", "x" * 257), ("user", 5)])
def test_bad_values_are_named(api: Any, path: str, field: str, value: Any) -> None:
    reply = api.http.post(path, json={**GENERATING[path], field: value})
    assert reply.status_code == 400
    message, param = message_and_param(reply)
    assert param == field
    assert message.startswith(field)


def test_an_id_that_is_in_use_is_a_conflict_everywhere(start_server: Any) -> None:
    server = start_server()
    server.engine.step_s = 0.01
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, "request_id": "mine"}
    with server.http.stream("POST", "/v1/completions", json=body) as running:
        pieces = running.iter_raw()  # closes the reply when it is dropped
        next(pieces)
        for path, least in GENERATING.items():
            for name in ("request_id", "rid") if path == "/generate" else ("request_id",):
                reply = server.http.post(path, json={**least, name: "mine"})
                assert reply.status_code == 409, path
                assert reply.headers["X-Request-Id"] == "mine"
                assert message_and_param(reply)[1] == "request_id"


def test_two_names_for_one_thing_are_refused_together(api: Any) -> None:
    for one, other in (("rid", "request_id"), ("extra_key", "cache_salt")):
        error = api.http.post("/generate", json={**GENERATING["/generate"], one: "a", other: "b"}).json()["error"]
        assert error["param"] == other
        assert one in error["message"]


# (a field that only some endpoints act on, a value that asks for something, one that asks for nothing)
ELSEWHERE = [("guided_regex", "a", None), ("n", 2, 1), ("tools", [{"type": "function", "function": {"name": "f"}}], []), ("stream", True, False)]


@ROUTES
@pytest.mark.parametrize(("field", "asking", "neutral"), ELSEWHERE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_an_endpoint_does_not_do_is_refused_by_name(api: Any, path: str, field: str, asking: Any, neutral: Any) -> None:
    schemas = api.http.get("/openapi.json").json()
    reference = schemas["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    if field in schemas["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]:
        pytest.skip("it does that")
    reply = api.http.post(path, json={**GENERATING[path], field: asking})
    assert reply.status_code == 400, reply.text
    assert message_and_param(reply)[1] == field
    reply = api.http.post(path, json={**GENERATING[path], field: neutral})
    assert reply.status_code == (500 if path == "/v1/embeddings" else 200), reply.text


def test_a_count_of_tokens_takes_nothing_of_how_it_would_run(api: Any) -> None:
    body = {"messages": HI}
    assert api.http.post("/v1/messages/count_tokens", json=body).status_code == 200
    for field, value in (("priority", 1), ("timeout_s", 1.0), ("request_id", "a"), ("cache_salt", "a"), ("seed", 1)):
        reply = api.http.post("/v1/messages/count_tokens", json={**body, field: value})
        assert reply.status_code == 400
        assert message_and_param(reply)[1] == field


# Where a grammar came from -> the body's fields that bring it.
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
BROUGHT: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "guided_json", {"guided_json": SCHEMA}),
    (
        "/v1/completions",
        "structural_tag",
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}},
    ),
    ("/v1/completions", "structured_outputs.regex", {"structured_outputs": {"regex": "a+"}}),
    ("/v1/chat/completions", "guided_choice", {"guided_choice": ["a"]}),
    ("/v1/chat/completions", "response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/chat/completions", "response_format", {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", "tools", {"tools": CALL, "tool_choice": "required"}),
    ("/v1/responses", "text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("/v1/messages", "tools", {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}),
    ("/generate", "sampling_params.regex", {"sampling_params": {"regex": "a+", "max_new_tokens": 4}}),
]


@pytest.mark.parametrize(("path", "param", "fields"), BROUGHT, ids=[f"{path} {param}" for path, param, _ in BROUGHT])
def test_a_grammar_that_fails_on_the_way_is_named_by_the_field_that_brought_it(
    start_server: Any, path: str, param: str, fields: dict[str, Any]
) -> None:
    server = start_server()
    server.engine.refuse = EngineError(400, "the grammar can't go on: too complex", reason=INVALID_GRAMMAR)
    body = {**GENERATING[path], **fields}
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400
    message, named = message_and_param(reply)
    assert named == param
    assert message == f"{param}: the grammar can't go on: too complex"
    # What has nothing to do with the grammar is not put down to it.
    server.engine.refuse = EngineError(400, "something else")
    assert message_and_param(server.http.post(path, json=body))[0] == "something else"
    # The same once tokens have come: an error event that says it.
    server.engine.refuse = None
    server.engine.step_s = 0.01
    server.engine.script = lambda request: iter([97] * 10_000)
    grown = {**body, "stream": True}
    grown |= {"sampling_params": {**body["sampling_params"], "max_new_tokens": 4000}} if path == "/generate" else {}
    grown |= {name: 4000 for name in ("max_tokens", "max_output_tokens") if name in body}
    with server.http.stream("POST", path, json=grown) as stream:
        pieces = stream.iter_text()
        next(pieces)
        server.engine.fail_request(EngineError(400, "the grammar can't go on", reason=INVALID_GRAMMAR))
        rest = "".join(pieces)
    assert f"{param}: the grammar can't go on" in rest
