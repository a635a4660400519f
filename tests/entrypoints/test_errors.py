"""What the engine refuses or breaks, as clients see it: real HTTP statuses, and errors inside a stream."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from fastengine.protocol.outputs import EngineError
from tests.frontend.harness import ApiServer

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [400, 409, 429, 503])
def test_a_refusal_of_the_engine_is_an_http_status(start_server, stream, code):
    server = start_server()
    server.engine.refuse = EngineError(code, f"no: {code}", param="prompt", retry_after_s=2.5 if code == 429 else None)
    reply = server.http.post(CHAT, json={**LONG, "stream": stream})
    error = reply.json()["error"]
    assert reply.status_code == code
    assert error["message"] == f"no: {code}"
    assert error["param"] == "prompt"
    assert reply.headers.get("retry-after") == {429: "3", 503: "1"}.get(code)
    assert server.engine.aborts == []


def read_stream(server: ApiServer, body: dict[str, Any], begun: threading.Event, out: dict[str, Any]) -> None:
    with server.http.stream("POST", CHAT, json=body) as reply:
        out["status"] = reply.status_code
        out["lines"] = []
        for line in reply.iter_lines():
            if line:
                out["lines"].append(line.removeprefix("data: "))
                begun.set()


@pytest.mark.parametrize("failure", ["request", "engine", "supervisor"])
def test_errors_inside_a_stream_are_an_event_and_done(start_server, failure):
    server = start_server()
    server.engine.step_s = 0.005
    begun, out = threading.Event(), {}
    reader = threading.Thread(target=read_stream, args=(server, {**LONG, "stream": True}, begun, out))
    reader.start()
    assert begun.wait(5)
    if failure == "request":
        server.engine.fail_request(EngineError(500, "a worker died twice"))
    else:
        server.engine.set_state("failed", "exit code 1")
    reader.join(5)
    assert out["status"] == 200
    assert out["lines"][-1] == "[DONE]"
    error = json.loads(out["lines"][-2])["error"]
    assert error["type"] == "server_error"
    assert ("died twice" if failure == "request" else "exit code 1") in error["message"]


def test_the_sdk_raises_the_error_of_a_stream(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    stream = server.sdk.chat.completions.create(model="tiny", stream=True, messages=LONG["messages"], max_tokens=4000)
    next(stream)
    server.engine.fail_request(EngineError(500, "a worker died twice"))
    with pytest.raises(openai.APIError, match="died twice"):
        list(stream)


def test_a_dead_engine_ends_whole_requests_with_503_at_once(start_server):
    server = start_server()
    server.engine.paused = True
    replies: list[Any] = []
    reader = threading.Thread(target=lambda: replies.append(server.http.post(CHAT, json=LONG)))
    reader.start()
    server.engine.wait_for(lambda: server.engine.num_running == 1)
    server.engine.set_state("failed", "exit code 1")
    reader.join(5)
    assert replies[0].status_code == 503
    assert "exit code 1" in replies[0].json()["error"]["message"]
    assert replies[0].headers["retry-after"]
    assert server.http.post(CHAT, json=LONG).status_code == 503
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/health").json()["state"] == "failed"
    server.engine.set_state("ready", paused=False)
    assert server.http.post(CHAT, json={**LONG, "max_tokens": 2}).status_code == 200


def test_two_live_requests_cannot_share_an_id(start_server):
    server = start_server()
    server.engine.step_s = 0.005
    begun, out = threading.Event(), {}
    reader = threading.Thread(target=read_stream, args=(server, {**LONG, "stream": True, "request_id": "same"}, begun, out))
    reader.start()
    assert begun.wait(5)
    for stream in (False, True):
        reply = server.http.post(CHAT, json={**LONG, "request_id": "same", "stream": stream})
        assert reply.status_code == 409
        assert reply.json()["error"]["param"] == "request_id"
    assert server.http.post("/v1/abort_requests", json={"req_ids": ["same"]}).json()["result"]["aborted"][0]["request_id"] == "same"
    reader.join(5)
    assert json.loads(out["lines"][-2])["choices"][0]["finish_reason"] == "abort"
    assert server.http.post(CHAT, json={**LONG, "request_id": "same", "max_tokens": 1}).json()["id"] == "same"


def test_an_aborted_request_ends_with_what_it_has_and_status_200(start_server):
    server = start_server()
    server.engine.step_s = 0.002
    replies: list[Any] = []
    reader = threading.Thread(target=lambda: replies.append(server.http.post(CHAT, json={**LONG, "request_id": "r", "n": 2})))
    reader.start()
    server.engine.wait_for(lambda: server.engine.num_running == 2)
    server.engine.wait_for(lambda: all(running.num_output > 5 for running in list(server.engine._running.values())))
    server.http.post("/v1/abort_requests", json={"req_ids": ["r"]})
    reader.join(5)
    assert replies[0].status_code == 200
    for choice in replies[0].json()["choices"]:
        assert choice["finish_reason"] == "abort"
        assert choice["message"]["content"].startswith("user:")


def test_reject_while_paused(start_server):
    server = start_server(reject_while_paused=True)
    server.http.post("/v1/pause", json={})
    reply = server.http.post(CHAT, json=LONG)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    server.http.post("/v1/resume", json={})
    assert server.http.post(CHAT, json={**LONG, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_failure_is_a_500_with_the_request_id(start_server, stream, monkeypatch):
    server = start_server()
    monkeypatch.setattr(server.front.manager, "generate", lambda *args, **kwargs: 1 / 0)
    reply = server.http.post(CHAT, json={**LONG, "request_id": "odd", "stream": stream})
    assert reply.status_code == 500
    assert "odd" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"] == "odd"
    # The exception goes on to the HTTP server, which closes the connection: the next request takes another.
    assert reply.headers["connection"] == "close"
    assert server.http.get("/health").status_code == 200


def test_an_unforeseen_failure_inside_a_stream_is_an_event(start_server, monkeypatch):
    server = start_server()
    monkeypatch.setattr("fastengine.entrypoints.openai.chunks.ChunkWriter.usage", lambda *args, **kwargs: 1 / 0)  # writes the last chunk
    server.engine.step_s = 0.002
    reply = server.http.post(CHAT, json={**LONG, "request_id": "odd", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50})
    lines = [line for line in reply.text.splitlines() if line]
    assert reply.status_code == 200
    assert lines[-1] == "data: [DONE]"
    assert "odd" in json.loads(lines[-2][6:])["error"]["message"]
    server.engine.wait_for(lambda: server.engine.num_running == 0)
