"""What becomes of a request whose client goes away, or is slow to read."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from tests.frontend.harness import ApiServer, say

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}


def open_request(server: ApiServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection with the request sent and nothing read."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi", "max_tokens": 4000})])
def test_a_disconnect_sends_exactly_one_abort(start_server, stream, path, body):
    server = start_server()
    engine = server.engine
    engine.step_s = 0.002
    connection = open_request(server, {**body, "stream": stream, "n": 2}, path)
    engine.wait_for(lambda: engine.num_running == 2)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    engine.wait_for(lambda: bool(engine.aborts) and engine.num_running == 0)
    assert sorted(engine.aborted_handles) == [1, 2]
    assert len(engine.aborts) == 1
    assert server.on_loop(lambda: (server.front.manager.num_streams, server.front.manager.num_sequences)) == (0, 0)
    server.engine.script = say("still here")
    assert server.http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": False}).json()["choices"][0]["message"]["content"] == "still here"
    assert len(engine.aborts) == 1


def test_a_disconnect_before_the_first_token_aborts(start_server):
    server = start_server()
    engine = server.engine
    engine.paused = True
    connection = open_request(server, {**CHAT, "stream": True})
    engine.wait_for(lambda: engine.num_running == 1)
    connection.close()
    engine.wait_for(lambda: engine.num_running == 0)
    assert len(engine.aborts) == 1


def test_a_finished_request_is_not_aborted(start_server):
    server = start_server()
    server.engine.script = say("done")
    for stream in (False, True):
        server.http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": False, "stream": stream})
    assert server.engine.aborts == []


def test_a_slow_reader_loses_nothing_and_holds_up_nobody(start_server):
    """Nobody reads the stream while the engine generates megabytes; then all of it is there."""
    server = start_server()
    engine = server.engine
    text = "0123456789" * 400
    engine.script = say(text)
    body = {**CHAT, "ignore_eos": False, "max_tokens": 4050, "stream": True, "return_token_ids": True, "logprobs": True, "top_logprobs": 5}
    connection = open_request(server, body)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    engine.wait_for(lambda: len(engine.generated) == 1 and engine.num_running == 0, 20)
    assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 20)
    connection.close()
    lines = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    assert [i for choice in choices for i in choice["delta"].get("completion_token_ids", [])][:-1] == list(text.encode())
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == text + "</s>"
    assert engine.aborts == []


def test_many_streams_at_once_each_get_their_own_text(start_server):
    server = start_server()
    server.engine.script = lambda request: say(f"answer to {bytes(request.prompt_token_ids)[::4].decode()}")(request)
    wrong: list[str] = []

    def client(i: int) -> None:
        body = {"prompt": f"question {i}", "max_tokens": 200, "stream": bool(i % 2)}
        reply = server.http.post("/v1/completions", json=body)
        if body["stream"]:
            chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        else:
            text = reply.json()["choices"][0]["text"]
        if text != f"answer to question {i}":
            wrong.append(text)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
