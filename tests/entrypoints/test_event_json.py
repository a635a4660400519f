"""Events are lines to every client, also to those that split at each line end that Unicode knows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastengine.entrypoints.event_json import event_json
from fastengine.protocol.outputs import EngineError
from tests.frontend.harness import say

TEXT = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\ni é 😀"
ASK = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize("value", [TEXT, {TEXT: [TEXT, {"x": TEXT}]}, "plain", ["é"], "\u2028", "\u0085" * 3])
def test_one_line_that_says_the_same(value: Any) -> None:
    text = event_json(value).decode()
    assert len(text.splitlines()) == 1
    assert json.loads(text) == value


def streamed(api: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events' data; a line that is no part of one fails the test."""
    events = []
    with api.http.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            name, _, data = line.partition(": ")
            assert name in ("", "event", "data")
            if name == "data" and data != "[DONE]":
                events.append(json.loads(data))
    return events


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant", "content": TEXT}], "continue_final_message": True, "echo": True}),
    ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": TEXT, "max_streaming_response_tokens": 9}),
    ("/v1/responses", {"input": TEXT, "instructions": TEXT, "metadata": {"x": TEXT}}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 99}),
    ("/generate", {"text": TEXT, "return_logprob": True, "return_text_in_logprobs": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_streams_are_events_line_by_line(api: Any, path: str, body: dict[str, Any]) -> None:
    api.engine.script = say(TEXT)
    if path != "/generate":
        body = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 99, **body}
    events = streamed(api, path, body)
    assert TEXT.partition("d")[0] in "".join(_strings(events))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [text for key in ("choices", "text", "delta", "content", "content_block") if isinstance(value, dict) for text in _strings(value.get(key))]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_errors_in_a_stream_are_one_line_too(start_server: Any, path: str) -> None:
    server = start_server()
    server.engine.step_s = 0.005
    body = {"model": "tiny", "stream": True, "max_tokens": 2000, "prompt": "ab"}
    if path == "/v1/messages":
        body = {"model": "tiny", "stream": True, "max_tokens": 2000, "messages": [{"role": "user", "content": "ab"}]}
    with server.http.stream("POST", path, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.engine.fail_request(EngineError(500, TEXT))
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert found[-1]["error"]["message"] == TEXT
