"""Structured output and forced calls by a real model, through the whole server."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server import Server

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]


@pytest.fixture
def chat(default_server: Server) -> Any:
    def post(content: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        reply = httpx.post(
            default_server.url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 64, "temperature": 0, **body}, timeout=120
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    return post


def test_grammars_of_every_kind_beside_plain_requests(chat: Any) -> None:
    plain = chat("Count from 1 to 20.", max_tokens=24)["message"]["content"]
    jobs = [
        ("Count from 1 to 20.", {"max_tokens": 24}),
        ("Describe a person.", {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}),
        # Hot: room for all the white space that JSON allows between its parts, which is bounded.
        ("Describe a person.", {"guided_json": PERSON, "temperature": 1.5, "seed": 3, "max_tokens": 700}),
        ("Is fire hot? Answer yes or no.", {"guided_choice": ["yes", "no"]}),
        ("When?", {"guided_regex": "(19|20)[0-9]{2}-[01][0-9]", "temperature": 2.0, "seed": 4}),
        ("Is fire hot?", {"guided_grammar": 'root ::= ("yes" | "no") "!"+ " done"', "stop": ["done"]}),
        ("Count from 1 to 20.", {"max_tokens": 24}),
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        choices = list(pool.map(lambda job: chat(job[0], **job[1]), jobs))
    texts = [choice["message"]["content"] for choice in choices]
    assert texts[0] == texts[-1] == plain
    for text in texts[1:3]:
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
    assert texts[3] in ("yes", "no")
    assert re.fullmatch("(19|20)[0-9]{2}-[01][0-9]", texts[4])
    assert re.match("(yes|no)!+", texts[5])
    assert [choice["finish_reason"] for choice in choices[1:5]] == ["stop"] * 4


def test_forced_calls(chat: Any) -> None:
    named = chat("Weather in Paris?", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    (call,) = named["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "city" in json.loads(call["function"]["arguments"])
    required = chat("Weather in Paris?", tools=TOOLS, tool_choice="required", max_tokens=200)
    assert required["finish_reason"] == "tool_calls"
    for call in required["message"]["tool_calls"]:
        assert call["function"]["name"] in ("get_weather", "get_time")
        assert set(json.loads(call["function"]["arguments"])) <= {"city", "zone"}


def test_loglikelihoods_of_echoed_prompts(default_server: Server) -> None:
    """As lm-eval asks for them: the same in a batch and alone, after the prompt's blocks were cached, with 0 or 1 tokens generated."""

    def score(prompts: list[str], max_tokens: int) -> list[list[float | None]]:
        body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
        choices = httpx.post(default_server.url + "/v1/completions", json=body, timeout=120).json()["choices"]
        return [choice["logprobs"]["token_logprobs"][: len(choice["logprobs"]["tokens"]) - max_tokens] for choice in choices]

    prompts = ["The capital of France is Paris. " * 8, "The capital of France is"]
    both = score(prompts, 1)
    assert both[0][0] is None
    assert all(value is not None and value <= 0 for values in both for value in values[1:])
    for prompt, expected in zip(prompts, both, strict=True):
        for max_tokens in (0, 1):
            (alone,) = score([prompt], max_tokens)
            assert alone[1:] == pytest.approx(expected[1:], abs=1e-3)
