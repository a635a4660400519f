"""The Responses API, read with OpenAI's own SDK."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from fastengine.ipc.runtime_dir import RuntimeDir
from tests.entrypoints.talk import ANSWER, CALL, prompt_of, text_with_parsers
from tests.frontend.harness import ApiServer, say

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]


@pytest.fixture(scope="module")
def api(shared_servers):
    return shared_servers(load=text_with_parsers)


@pytest.fixture(autouse=True)
def answer(api):
    api.engine.script = say(ANSWER)
    api.engine.generated.clear()


def create(api: ApiServer, **fields: Any) -> Any:
    return api.sdk.responses.create(**{"model": "tiny", "input": "hi", **fields})


def test_whole_response(api):
    response = create(api, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.output_text == ANSWER
    assert [(item.type, item.role, item.status) for item in response.output] == [("message", "assistant", "completed")]
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 50)
    assert prompt_of(api) == "system:Be brief.\nuser:hi\nassistant:"
    usage = response.usage
    assert usage.input_tokens == len(prompt_of(api))
    assert usage.output_tokens == len(ANSWER.encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == len(prompt_of(api)) // 2


def test_a_short_budget_makes_it_incomplete(api):
    response = create(api, max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("Hello", "incomplete")


def test_the_stream_says_the_same_in_openais_order(api):
    events = list(create(api, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    final, whole = events[-1].response, create(api)
    assert final.output_text == whole.output_text == events[-3].part.text
    assert final.usage == whole.usage
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[2].item.status == "in_progress"


def test_reasoning_text_and_a_call(api):
    api.engine.script = say(CALL)
    response = create(api, tools=TOOLS)
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert message.content[0].text == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris", "days": 3})
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    with api.sdk.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream if not event.type.endswith(".delta")]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"city": "Paris", "days": 3}
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.done",
        "response.content_part.done",
    ]
    assert kinds[-4:] == [
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_items_reach_the_template(api):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ]
    create(api, input=items)
    assert prompt_of(api) == "system:Be brief.\nuser:ab\nassistant:c\ntool:cold\nassistant:"


def test_structured_output_and_forced_calls_have_grammars(api):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    create(api, text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert api.engine.generated[-1].sampling.grammar.kind == "json_schema"
    api.engine.script = say('{"city": "Rome"}')
    response = create(api, tools=TOOLS, tool_choice={"type": "function", "name": "weather"})
    assert [item.type for item in response.output] == ["function_call"]


def test_log_probabilities(api):
    response = create(api, max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["H", "e", "l"]
    assert len(logprobs[0].top_logprobs) == 2


def test_a_conversation_goes_on(api):
    first = create(api, instructions="Be brief.")
    second = create(api, input="and now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt_of(api) == f"user:hi\nassistant:{ANSWER}\nuser:and now?\nassistant:"
    create(api, input="more", previous_response_id=second.id)
    assert prompt_of(api).count(ANSWER) == 2
    assert api.sdk.responses.retrieve(first.id) == first


def test_stored_responses_can_be_deleted_and_listed(api):
    response = create(api, input=[{"role": "user", "content": f"message {i}"} for i in range(3)])
    newest = api.sdk.responses.input_items.list(response.id, limit=2)
    assert [item.content for item in newest.data] == ["message 2", "message 1"]
    assert newest.has_more
    assert [item.content for item in api.sdk.responses.input_items.list(response.id, order="asc")] == [f"message {i}" for i in range(3)]
    api.sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        api.sdk.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        create(api, previous_response_id=response.id)


def test_what_is_not_stored_is_not_found(api):
    response = create(api, store=False)
    assert not response.store
    with pytest.raises(openai.NotFoundError):
        api.sdk.responses.retrieve(response.id)


def wait_for_end(api: ApiServer, response_id: str) -> Any:
    while (response := api.sdk.responses.retrieve(response_id)).status == "in_progress":
        pass
    return response


def test_in_the_background(api):
    response = create(api, background=True)
    assert response.status == "in_progress"
    done = wait_for_end(api, response.id)
    assert (done.status, done.output_text, done.background) == ("completed", ANSWER, True)
    assert api.sdk.responses.cancel(response.id).status == "completed"


def has_said_something(server: ApiServer) -> bool:
    return any(running.num_output > 3 for running in list(server.engine._running.values()))


def echoed(num_characters: int) -> str:
    """What the fake engine says when it isn't told what: the prompt, again and again."""
    return ("user:hi\nassistant:" * 100)[:num_characters]


def test_what_is_cancelled_says_so_and_what_it_had_from_whichever_process(start_server):
    first = start_server()
    first.engine.step_s = 0.005
    second = start_server(engine=False, runtime=first.runtime, index=1)
    for asked in (first, second):
        first.engine.generated.clear()
        response = create(first, background=True, max_output_tokens=4000)
        assert second.sdk.responses.retrieve(response.id).status == "in_progress"
        with pytest.raises(openai.ConflictError):
            second.sdk.responses.delete(response.id)
        first.engine.wait_for(lambda: has_said_something(first))
        cancelled = asked.sdk.responses.cancel(response.id)
        assert (cancelled.status, cancelled.error, cancelled.completed_at) == ("cancelled", None, None)
        assert cancelled.output_text == echoed(len(cancelled.output_text)) != ""
        assert cancelled.output[0].status == "incomplete"
        assert cancelled.usage.output_tokens == len(cancelled.output_text)
        for server in (first, second):
            assert server.sdk.responses.retrieve(response.id) == server.sdk.responses.cancel(response.id) == cancelled
        first.engine.wait_for(lambda: first.engine.num_running == 0)


def test_a_response_that_fails_in_the_background_keeps_what_it_had(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    response = create(server, background=True, max_output_tokens=4000)
    server.engine.wait_for(lambda: has_said_something(server))
    server.engine.set_state("failed", "exit code 1")
    failed = wait_for_end(server, response.id)
    assert failed.status == "failed"
    assert "exit code 1" in failed.error.message
    assert failed.output_text == echoed(len(failed.output_text)) != ""


def test_a_process_that_no_longer_answers_is_no_reason_to_wait(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    response = create(server, background=True, max_output_tokens=4000)
    server.runtime.file("responses-0").unlink()
    assert server.sdk.responses.cancel(response.id).status == "in_progress"


def test_a_response_whose_process_died_has_failed(api, tmp_path):
    response = create(api)
    file = api.runtime.file(f"responses/{response.id}")
    import msgspec

    record = msgspec.msgpack.decode(file.read_bytes())
    record["response"]["status"], record["owner"] = "in_progress", 2**22 + 1
    file.write_bytes(msgspec.msgpack.encode(record))
    assert api.sdk.responses.retrieve(response.id).status == "failed"


def stored(runtime: RuntimeDir) -> set[str]:
    return {file.name for file in runtime.file("responses").iterdir()}


def test_the_store_is_bounded(start_server):
    server = start_server(max_stored_responses=3)
    server.engine.script = say("x")
    ids = [create(server).id for _ in range(5)]
    assert stored(server.runtime) == set(ids[2:])
    small = start_server(stored_responses_mib=0.005)
    small.engine.script = say("x" * 1000)
    ids = [create(small).id for _ in range(4)]
    kept = stored(small.runtime)
    assert 1 <= len(kept) < 4
    assert kept == set(ids[-len(kept) :])
    none = start_server(max_stored_responses=0)
    none.engine.script = say("x")
    assert not create(none).store
    with pytest.raises(openai.BadRequestError):
        create(none, store=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "wat"}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "../x"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(api, fields, field):
    reply = api.http.post("/v1/responses", json={"input": "hi", **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)


def test_bad_queries_are_refused(api):
    response_id = create(api).id
    for path in (
        f"{response_id}?stream=true",
        f"{response_id}?include[]=file_search_call.results",
        f"{response_id}/input_items?include=file_search_call.results",
        f"{response_id}/input_items?limit=0",
        f"{response_id}/input_items?order=x",
        f"{response_id}/input_items?after=x",
    ):
        assert api.http.get(f"/v1/responses/{path}").status_code == 400
    assert api.http.post(f"/v1/responses/{response_id}/cancel").status_code == 400
    assert api.http.get("/v1/responses/..%2Fconfig.json").status_code == 404


def test_an_error_inside_a_stream_is_a_failed_response(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    events = []
    for event in create(server, stream=True, max_output_tokens=4000):
        events.append(event)
        if event.type == "response.output_text.delta" and len(events) < 8:
            server.engine.set_state("failed", "exit code 1")
    assert events[-1].type == "response.failed"
    final = events[-1].response
    assert (final.status, final.completed_at) == ("failed", None)
    assert "exit code 1" in final.error.message
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.output_text == told != ""
    assert [item.status for item in final.output] == ["incomplete"]
    assert final.usage.output_tokens == len(told)
    assert server.sdk.responses.retrieve(final.id) == final


def test_a_client_that_went_away_finds_what_it_has_missed(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    told, response_id = "", ""
    with create(server, stream=True, max_output_tokens=4000) as stream:
        for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                told += event.delta
            if len(told) > 5:
                break
    server.engine.wait_for(lambda: server.engine.num_running == 0)
    while server.http.get(f"/v1/responses/{response_id}").status_code == 404:
        pass
    response = server.sdk.responses.retrieve(response_id)
    assert (response.status, response.error) == ("cancelled", None)
    assert response.output_text.startswith(told)


BROKEN_CALL = 'See: <tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'


def test_a_call_that_turns_out_to_be_none(api):
    api.engine.script = say(BROKEN_CALL)
    response = create(api, tools=TOOLS)
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == BROKEN_CALL
    events = list(create(api, tools=TOOLS, stream=True))
    final = events[-1].response
    assert [(item.type, item.status) for item in final.output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert final.output_text == BROKEN_CALL
    with pytest.raises(json.JSONDecodeError):
        json.loads(final.output[1].arguments)
    # The model isn't shown a call that it never made.
    api.engine.script = say(ANSWER)
    create(api, previous_response_id=final.id, input="and?")
    assert prompt_of(api) == f"user:hi\nassistant:{BROKEN_CALL}\nuser:and?\nassistant:"
