"""Tool calls and reasoning in chat completions, whole and streamed, with any chunking."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from fastengine.frontend.text_service import ModelText
from fastengine.protocol.requests import ReasoningSpec
from fastengine.text.chat_template import ChatTemplate
from fastengine.text.output_parser import OutputFormat
from fastengine.text.plugins import load_parsers
from fastengine.text.token_pieces import TokenPieces
from tests.entrypoints.test_chat import HI, chat, chunks
from tests.frontend.harness import VOCAB_SIZE, ApiServer, ByteTokenizer, model_text, say

THINK, END_THINK = VOCAB_SIZE, VOCAB_SIZE + 1
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}\n{% endfor %}"
    "assistant:{% if enable_thinking is false %}<think></think>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, true, {}]}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = [{"city": "Paris", "days": [1, True, {}]}, {}]


class ThinkTokenizer(ByteTokenizer):
    """Bytes, and the reasoning's two markers as a token each."""

    def __init__(self) -> None:
        super().__init__()
        assert self.pieces is not None
        self.vocab_size = VOCAB_SIZE + 2
        self.pieces = TokenPieces([*self.pieces.bytes_of, b"<think>", b"</think>"])

    def token_id(self, token: str) -> int | None:
        return {"<think>": THINK, "</think>": END_THINK}.get(token)


def loader(tool_parser: str | None = None, reasoning_parser: str | None = None) -> Callable[[], ModelText]:
    def load() -> ModelText:
        text = model_text()
        return dataclasses.replace(
            text,
            spec=dataclasses.replace(text.spec, vocab_size=VOCAB_SIZE + 2),
            tokenizer=ThinkTokenizer(),
            chat_template=ChatTemplate(TEMPLATE, {}),
            output_format=OutputFormat.from_names(load_parsers(), tool_parser=tool_parser, reasoning_parser=reasoning_parser),
        )

    return load


@pytest.fixture(scope="module")
def tools(shared_servers) -> ApiServer:
    return shared_servers(load=loader(tool_parser="hermes"))


@pytest.fixture(scope="module")
def both(shared_servers) -> ApiServer:
    return shared_servers(load=loader("hermes", "qwen3"))


def joined(parts: list[Any], index: int = 0) -> dict[str, Any]:
    """A stream's deltas put together as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for choice in (c for part in parts for c in part["choices"] if c["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


@pytest.mark.parametrize("gathered", [1, 3, 1000])
def test_calls_come_out_of_the_text(tools, gathered):
    tools.engine.script = say(CALLS)
    body = {"tools": [WEATHER, TIME], "return_token_ids": True}
    choice = chat(tools, **body)["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert [(call["type"], call["function"]["name"]) for call in message["tool_calls"]] == [("function", "weather"), ("function", "time")]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert bytes(message["prompt_token_ids"]).decode().startswith("tools:weather time user:hi")
    parts = chunks(tools, messages=HI, max_streaming_response_tokens=gathered, **body)
    streamed = joined(parts)
    assert streamed["content"] == "Let me see."
    assert streamed["finish_reason"] == "tool_calls"
    assert [(call["name"], json.loads(call["arguments"])) for call in streamed["tool_calls"]] == list(
        zip(["weather", "time"], ARGUMENTS, strict=True)
    )
    ids = [i for part in parts for c in part["choices"] for i in c["delta"].get("completion_token_ids", [])]
    assert ids == message["completion_token_ids"]


def test_arguments_arrive_as_they_are_generated(tools):
    tools.engine.script = say(CALLS)
    tools.engine.step_s = 0.002
    parts = chunks(tools, messages=HI, tools=[WEATHER, TIME])
    tools.engine.step_s = 0.0
    pieces = [c["delta"]["tool_calls"][0] for part in parts for c in part["choices"] if "tool_calls" in c["delta"]]
    assert len([piece for piece in pieces if piece["index"] == 0]) > 10


def test_one_call_alone_when_not_parallel(tools):
    tools.engine.script = say(CALLS)
    message = chat(tools, tools=[WEATHER, TIME], parallel_tool_calls=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert len(joined(chunks(tools, messages=HI, tools=[WEATHER, TIME], parallel_tool_calls=False))["tool_calls"]) == 1


def test_no_call_is_content(tools):
    tools.engine.script = say("Just text.")
    for body in ({"tools": [WEATHER]}, {"tools": []}, {"tool_choice": "none"}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = chat(tools, **body)["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Just text.", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert joined(chunks(tools, messages=HI, **body)) == {
            "content": "Just text.",
            "reasoning_content": "",
            "tool_calls": [],
            "finish_reason": "stop",
        }


def test_tool_choice_none_neither_shows_tools_nor_looks_for_calls(tools):
    tools.engine.script = say(CALLS)
    message = chat(tools, tools=[WEATHER], tool_choice="none", return_token_ids=True)["choices"][0]["message"]
    assert message["content"] == CALLS
    assert "tools:" not in bytes(message["prompt_token_ids"]).decode()


def test_a_call_that_is_cut_off_keeps_its_length_reason(tools):
    tools.engine.script = say(CALLS)
    choice = chat(tools, tools=[WEATHER], max_tokens=CALLS.index("Paris"))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


GOOD_CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
BROKEN_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}, oops}</tool_call>'


@pytest.mark.parametrize("text", [f"See: {BROKEN_CALL}", f"See: {BROKEN_CALL[:-20]}"])
def test_a_broken_call_is_text_and_a_stream_that_began_it_says_so(tools, text):
    tools.engine.script = say(text)
    choice = chat(tools, tools=[WEATHER, TIME])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    streamed = joined(chunks(tools, messages=HI, tools=[WEATHER, TIME]))
    assert (streamed["content"], streamed["finish_reason"]) == (text, "stop")
    (call,) = streamed["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])


@pytest.mark.parametrize("text", [GOOD_CALL + BROKEN_CALL, BROKEN_CALL + GOOD_CALL])
def test_a_broken_call_beside_a_good_one(tools, text):
    tools.engine.script = say(text)
    choice = chat(tools, tools=[WEATHER, TIME])["choices"][0]
    assert choice["message"]["content"] == BROKEN_CALL
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    assert choice["finish_reason"] == "tool_calls"
    streamed = joined(chunks(tools, messages=HI, tools=[WEATHER, TIME]))
    # Who runs what a stream has promised would run the broken one, too.
    assert (streamed["content"], streamed["finish_reason"]) == (BROKEN_CALL, "stop")
    assert {call["name"] for call in streamed["tool_calls"]} == {"weather", "time"}


@pytest.mark.parametrize(
    ("choice", "text", "expected"),
    [
        (NAMED, '{"city": "Rome"}', [("weather", {"city": "Rome"})]),
        (
            "required",
            '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rome"}}]',
            [("time", {}), ("weather", {"city": "Rome"})],
        ),
    ],
)
@pytest.mark.parametrize("server", ["api", "both"])
def test_forced_calls_need_no_parser(request, server, choice, text, expected):
    server = request.getfixturevalue(server)
    server.engine.script = say(text)
    server.engine.generated.clear()
    body = {"tools": [WEATHER, TIME], "tool_choice": choice}
    answer = chat(server, **body)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer["message"]["tool_calls"]] == expected
    streamed = joined(chunks(server, messages=HI, **body))
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed["tool_calls"]] == expected
    assert streamed["content"] == ""
    for sent in server.engine.generated:
        assert sent.sampling.grammar.kind == "lark"
        assert '"city"' in sent.sampling.grammar.source
        assert sent.sampling.reasoning is None


def test_strict_tools_are_held_to_their_schema(tools):
    tools.engine.script = say("no call")
    tools.engine.generated.clear()
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    chat(tools, tools=[strict])
    chat(tools, tools=[WEATHER])
    bound, free = tools.engine.generated
    assert bound.sampling.grammar.kind == "structural_tag"
    assert free.sampling.grammar is None


def test_calls_and_results_of_earlier_turns_reach_the_template(tools):
    tools.engine.script = say("Sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "sun"}]
    message = chat(tools, messages=messages, return_token_ids=True)["choices"][0]["message"]
    assert bytes(message["prompt_token_ids"]).decode() == "user:hiassistant:NoneOslotool:sunassistant:"


def think(thought: str, answer: str) -> Callable[[Any], list[int]]:
    return lambda request: [THINK, *thought.encode(), END_THINK, *say(answer)(request)]


def test_reasoning_comes_apart_from_the_answer(both):
    both.engine.script = think("hm,\nwell", "\n\nYes.")
    message = chat(both)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "hm,\nwell"}
    streamed = joined(chunks(both, messages=HI))
    assert (streamed["reasoning_content"], streamed["content"], streamed["finish_reason"]) == ("hm,\nwell", "Yes.", "stop")
    without = chat(both, include_reasoning=False)
    assert without["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert without["usage"]["completion_tokens"] == len("hm,\nwell\n\nYes.") + 3
    assert joined(chunks(both, messages=HI, include_reasoning=False))["reasoning_content"] == ""


def test_reasoning_then_calls(both):
    both.engine.script = think("call both", CALLS)
    streamed = joined(chunks(both, messages=HI, tools=[WEATHER, TIME]))
    assert streamed["reasoning_content"] == "call both"
    assert [call["name"] for call in streamed["tool_calls"]] == ["weather", "time"]
    assert streamed["finish_reason"] == "tool_calls"


def test_an_answer_within_its_reasoning_is_all_reasoning(both):
    both.engine.script = think("hm" * 20, "Yes")
    choice = chat(both, max_tokens=10)["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm" * 4 + "h"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


def test_logprobs_cover_what_the_parsers_take_away(both):
    both.engine.script = think("a", "b")
    choice = chat(both, logprobs=True)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<think>", "a", "</think>", "b", "</s>"]
    parts = chunks(both, messages=HI, logprobs=True)
    streamed = [e["token"] for p in parts for c in p["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == ["<think>", "a", "</think>", "b", "</s>"]


REASONING = ReasoningSpec(begin_token_id=THINK, end_token_id=END_THINK)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"guided_choice": ["a"]}, REASONING),
        ({"guided_choice": ["a"], "reasoning_max_tokens": 7}, ReasoningSpec(begin_token_id=THINK, end_token_id=END_THINK, max_tokens=7)),
        ({"reasoning_max_tokens": 7}, ReasoningSpec(begin_token_id=THINK, end_token_id=END_THINK, max_tokens=7)),
        ({"guided_choice": ["a"], "enable_thinking": False}, None),
        ({"guided_choice": ["a"], "reasoning_effort": "none"}, None),
        ({"reasoning_max_tokens": 7, "chat_template_kwargs": {"enable_thinking": False}}, None),
        (
            {"reasoning_max_tokens": 7, "prompt_token_ids": [*b"x", THINK], "messages": None},
            ReasoningSpec(end_token_id=END_THINK, starts_inside=True, max_tokens=7),
        ),
        ({"reasoning_max_tokens": 7, "prompt_token_ids": [THINK, END_THINK], "messages": None}, None),
        ({"tools": [WEATHER], "tool_choice": NAMED}, None),
    ],
)
def test_the_engine_is_told_where_the_reasoning_is(both, fields, expected):
    both.engine.script = say('{"city": "x"}')
    both.engine.generated.clear()
    chat(both, **fields)
    (request,) = both.engine.generated
    assert request.sampling.reasoning == expected
    assert request.sampling.skip_special_tokens == ("tool_choice" in fields)


def test_a_grammar_without_a_marker_token_leaves_no_reasoning(start_server):
    def load() -> ModelText:
        return dataclasses.replace(
            model_text(), output_format=OutputFormat.from_names(load_parsers(), tool_parser=None, reasoning_parser="deepseek-r1")
        )

    server = start_server(load=load)
    server.engine.script = say("yes")
    assert chat(server, guided_choice=["yes"])["choices"][0]["message"]["content"] == "yes"
    assert chat(server)["choices"][0]["message"]["reasoning_content"] == "yes"
    reply = server.http.post("/v1/chat/completions", json={"messages": HI, "reasoning_max_tokens": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "reasoning_max_tokens"


def test_every_answer_of_n_has_its_own_parser(both):
    both.engine.script = lambda request: think(f"thought {request.index}", CALLS if request.index else "none")(request)
    reply = chat(both, n=2, tools=[WEATHER, TIME])
    assert [c["finish_reason"] for c in reply["choices"]] == ["stop", "tool_calls"]
    assert [c["message"]["reasoning_content"] for c in reply["choices"]] == ["thought 0", "thought 1"]
    parts = chunks(both, messages=HI, n=2, tools=[WEATHER, TIME])
    assert [joined(parts, i)["finish_reason"] for i in range(2)] == ["stop", "tool_calls"]


def test_the_sdk_reads_streamed_calls(tools):
    tools.engine.script = say(CALLS)
    with tools.sdk.chat.completions.stream(model="tiny", messages=HI, tools=[WEATHER, TIME]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS[0]


def test_the_servers_flags_choose_the_parsers(default_model):
    from fastengine.config import EngineConfig
    from fastengine.frontend.text_service import load_model_text
    from fastengine.text.plugins import ParserError

    flags = {"model": str(default_model), "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    output_format = load_model_text(EngineConfig.from_flags(**flags).model).output_format
    assert output_format.tool_parser is not None
    assert output_format.reasoning_parser is not None
    with pytest.raises(ParserError, match="hermes"):
        load_model_text(EngineConfig.from_flags(**{**flags, "tool_call_parser": "hermit"}).model)
