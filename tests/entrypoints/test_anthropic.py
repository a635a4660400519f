"""Anthropic's Messages API: read with Anthropic's own SDK where that shows what a client gets."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
from typing import Any

import anthropic
import pytest

from tests.entrypoints.bodies import HI
from tests.entrypoints.talk import ANSWER, CALL, prompt_of, text_with_parsers
from tests.frontend.harness import EOS, ApiServer, say

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "cold"}
CALLED: dict[str, Any] = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]}
PROMPT = "user:hi\nassistant:"
TOOLS = [{"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]


@pytest.fixture(scope="module")
def api(shared_servers):
    return shared_servers(load=text_with_parsers)


@pytest.fixture(autouse=True)
def answer(api):
    api.engine.script = say(ANSWER)
    api.engine.generated.clear()


def sdk(api: ApiServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=api.url, api_key="none", max_retries=0, timeout=20, **options)


def create(api: ApiServer, **fields: Any) -> anthropic.types.Message:
    return sdk(api).messages.create(**{"model": "tiny", "max_tokens": 100, "messages": HI, **fields})


def test_whole_message(api):
    message = create(api)
    assert message.id.startswith("msg-")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello, wörld 🌞!")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    cached = len(PROMPT) // 2
    assert message.usage.input_tokens == len(PROMPT) - cached
    assert message.usage.cache_read_input_tokens == cached
    assert message.usage.output_tokens == len("Hello, wörld 🌞!".encode()) + 1


def test_the_stream_says_the_same(api):
    with sdk(api).messages.stream(model="default", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello, wörld 🌞!"
        streamed = stream.get_final_message()
    whole = create(api)
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def raw_events(api: ApiServer, **fields: Any) -> list[Any]:
    reply = api.http.post("/v1/messages", json={"max_tokens": 100, "messages": HI, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    events = []
    for part in reply.text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_the_order_of_events(api):
    kinds = [event["type"] for event in raw_events(api)]
    middle = [kind for kind in kinds if kind != "content_block_delta"]
    assert middle == ["message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_thinking_text_and_a_tool_call(api):
    api.engine.script = say(CALL)
    message = create(api, tools=TOOLS, max_tokens=200)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == ("Hm.", "Let me look.")
    assert (call.name, call.input) == ("weather", {"city": "Paris", "days": 3})
    assert message.stop_reason == "tool_use"
    with sdk(api).messages.stream(model="tiny", max_tokens=200, messages=HI, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    assert [block.model_dump(exclude={"id", "parsed_output"}) for block in streamed.content] == [
        block.model_dump(exclude={"id", "parsed_output"}) for block in message.content
    ]
    assert streamed.stop_reason == "tool_use"
    indices = [event["index"] for event in raw_events(api, tools=TOOLS, max_tokens=200) if event["type"] == "content_block_start"]
    assert indices == [0, 1, 2]


def test_a_forced_call_is_held_to_its_schema(api):
    api.engine.script = say('{"city": "Rome"}')
    message = create(api, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert [(block.type, block.input) for block in message.content] == [("tool_use", {"city": "Rome"})]
    assert api.engine.generated[-1].sampling.grammar is not None


def test_arguments_cut_off_are_none(api):
    api.engine.script = say(CALL)
    message = create(api, tools=TOOLS, max_tokens=len(CALL) - 30)
    assert message.stop_reason == "max_tokens"
    assert message.content[-1].input == {}


def test_stop_sequences(api):
    message = create(api, stop_sequences=["wör"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("Hello, ", "stop_sequence", "wör")
    assert create(api, max_tokens=2).stop_reason == "max_tokens"


def test_a_call_that_turns_out_to_be_none_is_text(api):
    text = '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'
    api.engine.script = say(text)
    message = create(api, tools=TOOLS)
    assert [(block.type, block.text) for block in message.content] == [("text", text)]
    assert message.stop_reason == "end_turn"
    events = raw_events(api, tools=TOOLS)
    assert "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta") == text
    assert next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta") == "end_turn"


def test_system_tool_results_and_prefill_reach_the_template(api):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "cold"}]}, {"type": "text", "text": "so?"}],
        },
        {"role": "assistant", "content": "It is"},
    ]
    create(api, system=[{"type": "text", "text": "Be brief."}], messages=messages)
    prompt = prompt_of(api)
    assert prompt.startswith("system:Be brief.\nuser:a\nb\nassistant:")
    assert prompt.endswith("tool:cold\nuser:so?\nassistant:It is")


def test_count_tokens(api):
    count = sdk(api).messages.count_tokens(model="tiny", messages=HI, system="s")
    assert count.input_tokens == len("system:s\n" + PROMPT)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "messages"),
        ({"system": [{"text": "a"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2000}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024}, "thinking.budget_tokens"),
        # The tokenizer's marker isn't one token.
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "zz", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, CALLED, {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "t2"}]}]}, "messages[2].content[1].tool_use_id"),
        ({"messages": [*HI, CALLED, {"role": "user", "content": [RESULT, RESULT]}]}, "messages[2].content[1].tool_use_id"),
        ({"messages": [*HI, CALLED, *HI, CALLED, {"role": "user", "content": [RESULT]}]}, "messages[1].content[0]"),
        ({"messages": [*HI, CALLED, *HI]}, "messages[1].content[0]"),
        ({"messages": [*HI, {"role": "assistant", "content": CALLED["content"] * 2}]}, "messages[1].content[1].id"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_400s_of_anthropics_shape(api, fields, field, stream):
    reply = api.http.post("/v1/messages", json={"max_tokens": 10, "messages": HI, "stream": stream, **fields})
    body = reply.json()
    assert reply.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(field)


def test_every_error_has_anthropics_shape(start_server):
    server = start_server(api_key=("secret",))
    with pytest.raises(anthropic.AuthenticationError) as refused:
        create(server)
    assert refused.value.body["error"]["type"] == "authentication_error"
    client = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", max_tokens=4, messages=HI)
    assert unknown.value.body["type"] == "error"
    assert server.http.get("/v1/messages", headers={"x-api-key": "secret"}).json()["type"] == "error"
    server.engine.script = say("ok")
    assert client.messages.create(model="tiny", max_tokens=4, messages=HI).content[0].text == "ok"


def test_an_error_inside_a_stream_is_an_error_event(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    with sdk(server).messages.stream(model="tiny", max_tokens=4000, messages=HI) as stream:
        next(event for event in stream if event.type == "content_block_delta")
        server.engine.set_state("failed", "exit code 1")
        with pytest.raises(anthropic.APIStatusError) as failed:
            stream.until_done()
    assert failed.value.body["error"]["type"] == "overloaded_error"


ABORTS = [("/v1/pause", {"mode": "abort"}), ("/v1/abort_requests", {"abort_all": True})]


@pytest.mark.parametrize(("path", "body"), ABORTS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_delivers_the_text_so_far(start_server, path, body, stream):
    server = start_server()
    server.engine.step_s = 0.005
    server.engine.script = lambda request: itertools.cycle(b"word ")
    fields = {"model": "tiny", "max_tokens": 4000, "messages": HI}

    def message() -> anthropic.types.Message:
        if not stream:
            return sdk(server).messages.create(**fields)
        with sdk(server).messages.stream(**fields) as events:
            return events.get_final_message()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(message)
        server.engine.wait_for(lambda: any(running.num_output >= 12 for running in server.engine._running.values()))
        assert server.http.post(path, json=body).status_code == 200
        message = waiting.result(20)
    assert message.stop_reason == "max_tokens"
    assert message.content[0].text.startswith("word word ")
    assert message.usage.output_tokens == len(message.content[0].text)


def test_an_abort_before_the_first_token_is_an_empty_message(start_server):
    server = start_server()
    server.engine.step_s = 60.0
    server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})  # the engine takes its pause from here on
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, server)
        server.engine.wait_for(lambda: server.engine.num_running == 1)
        server.http.post("/v1/abort_requests", json={"abort_all": True})
        message = waiting.result(20)
    assert (message.content, message.stop_reason) == ([], "max_tokens")


def test_the_end_token_has_no_text(api):
    api.engine.script = lambda request: [EOS]
    assert create(api).content == []
