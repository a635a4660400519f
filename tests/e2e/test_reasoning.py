"""Reasoning over HTTP, told apart while it streams: a tiny model whose words are chosen by biases, grammars and budgets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TINY, TINY_FLAGS
from tests.server import running_server

# Two bytes that no text has: their tokens become the markers.
THINK, END_THINK = 254, 255
PROMPT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
CLOSE = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
# The model opens its reasoning itself, or the template does.
TEMPLATES = {"model": PROMPT + CLOSE + "{% endif %}{% endif %}", "template": PROMPT + CLOSE + "{% else %}<think>\n{% endif %}{% endif %}"}
A = {str(ord("a")): 100}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC", "day": 3}}\n</tool_call>'
CALL_REGEX = CALL.replace("{", r"\{").replace("}", r"\}")
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}]


@dataclass
class Thinker:
    """A server whose model reasons. ``wrap`` is how it writes an answer, ``begin`` what its reasoning begins with."""

    url: str
    wrap: str
    bias: dict[str, int]
    reasoning: str

    def ask(self, **fields: Any) -> tuple[dict[str, Any], str]:
        """(the message, its finish reason), which are the same whole and streamed."""
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 120, **fields}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                message, finish_reason, order = gathered(stream)
        assert (message, finish_reason) == (said(choice["message"]), choice["finish_reason"])
        assert order == sorted(order, key=["reasoning_content", "content", "tool_calls"].index)
        return message, finish_reason


def said(message: dict[str, Any]) -> dict[str, Any]:
    """What there is of reasoning, content, and calls as (name, arguments)."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    kinds = {"reasoning_content": message.get("reasoning_content"), "content": message["content"], "tool_calls": calls}
    return {name: value for name, value in kinds.items() if value}


def gathered(stream: httpx.Response) -> tuple[dict[str, Any], str, list[str]]:
    """(the message, its finish reason, the kinds of its deltas in their order)"""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    finish_reason, order = "", []
    for line in stream.iter_lines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        finish_reason = choice["finish_reason"] or finish_reason
        for name, value in choice["delta"].items():
            if name in ("reasoning_content", "content") and value:
                message[name] += value
                order.append(name)
            for call in value if name == "tool_calls" else []:
                order.append(name)
                if call.get("id"):
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    return said(message), finish_reason, order


@pytest.fixture(scope="module", params=["qwen3", "ernie-x1"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    parser = request.param
    opened_by = "model" if parser == "qwen3" else "template"
    model = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(TINY, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token_id, marker in ((THINK, "<think>"), (END_THINK, "</think>")):
        del vocabulary[next(token for token, i in vocabulary.items() if i == token_id)]
        vocabulary[marker] = token_id
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": marker, **flags})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES[opened_by]}))
    tools = "ernie-x1" if parser == "ernie-x1" else "hermes"
    with running_server(model, *TINY_FLAGS, "--reasoning-parser", parser, "--tool-call-parser", tools, "--check-invariants") as server:
        wrap = "<response>\n{}\n</response>\n" if parser == "ernie-x1" else "{}"
        # The marker that the model opens its reasoning with is what the bias makes it repeat.
        bias, reasoning = ({str(THINK): 100}, "<think>" * 5) if opened_by == "model" else (A, "aaaaa")
        yield Thinker(server.url, wrap, bias, reasoning)


def test_reasoning_then_an_answer(thinker: Thinker) -> None:
    budget = {"reasoning_max_tokens": 5, "logit_bias": thinker.bias}
    answer = {"guided_regex": thinker.wrap.format("Yes[.]")}
    assert thinker.ask(**budget, **answer) == ({"reasoning_content": thinker.reasoning, "content": "Yes."}, "stop")
    assert thinker.ask(**budget, **answer, include_reasoning=False) == ({"content": "Yes."}, "stop")
    message, reason = thinker.ask(logit_bias=thinker.bias, max_tokens=6)  # it never comes to its end
    assert (message.keys(), reason) == ({"reasoning_content"}, "length")


def test_no_reasoning_when_thinking_is_off(thinker: Thinker) -> None:
    answer = {"guided_regex": thinker.wrap.format("No[.]")}
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert thinker.ask(**answer, **off) == ({"content": "No."}, "stop")
    budget = {"reasoning_max_tokens": 5, "logit_bias": thinker.bias}
    assert thinker.ask(**budget, **answer, enable_thinking=True)[0]["reasoning_content"] == thinker.reasoning


def test_a_call_behind_the_reasoning(thinker: Thinker) -> None:
    budget = {"reasoning_max_tokens": 5, "logit_bias": thinker.bias, "max_tokens": 200}
    message, reason = thinker.ask(**budget, tools=TOOLS, guided_regex=CALL_REGEX)
    ((name, arguments),) = message["tool_calls"]
    assert (name, json.loads(arguments)) == ("get_time", {"zone": "UTC", "day": 3})
    assert message["reasoning_content"] == thinker.reasoning
    assert "content" not in message
    assert reason == "tool_calls"


def test_messages_and_responses_tell_it_apart_too(thinker: Thinker) -> None:
    hi = [{"role": "user", "content": "hi"}]
    with httpx.Client(base_url=thinker.url, timeout=60) as client:
        # Anthropic's least budget is 1024 tokens: more than this test has.
        message = client.post("/v1/messages", json={"messages": hi, "max_tokens": 12}).json()
        assert message["content"][0]["type"] == ("thinking" if thinker.bias == A else "text")
        fields = {"reasoning": {"max_tokens": 5}, "max_output_tokens": 12, "temperature": 0}
        response = client.post("/v1/responses", json={"input": "hi", **fields}).json()
        assert response["output"][0]["type"] == ("reasoning" if thinker.bias == A else "message")
