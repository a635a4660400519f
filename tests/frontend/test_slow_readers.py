"""Clients that read nothing for long: they make nobody wait, keep to their bound of memory, and get everything in the end."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.frontend.harness import ApiServer, say

NUM_OTHERS = 32
SMALL = 4096
# What uvicorn lets wait in its own buffer before writers have to, and the event that was written last.
WRITE_BUFFER_BOUND = (64 << 10) + SMALL


def answer(prompt: str) -> str:
    return (f"answer to {prompt}. " * 100)[:1200] if "slow" in prompt else f"answer to {prompt}"


def ask_and_read_nothing(server: ApiServer, body: dict[str, Any]) -> socket.socket:
    data = json.dumps({"stream": True, "max_tokens": 4000, **body}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def chunks_of(connection: socket.socket) -> list[dict[str, Any]]:
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 20)
        assert piece
        received += piece
    lines = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed_text(server: ApiServer, prompt: str) -> str:
    reply = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 200, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(("num_slow", "with_ids"), [(1, True), (8, True), (8, False)])
def test_those_who_read_nothing_hold_up_nobody_and_stay_small(start_server, num_slow: int, with_ids: bool) -> None:
    server = start_server(send_buffer_bytes=SMALL)
    engine = server.engine
    engine.step_s = 0.0005  # each token an event of its own, as long as somebody reads
    engine.script = lambda request: say(answer(bytes(request.prompt_token_ids)[::4].decode()))(request)
    slow = [ask_and_read_nothing(server, {"prompt": f"slow {i}", "return_token_ids": with_ids}) for i in range(num_slow)]
    engine.wait_for(lambda: len(engine.generated) >= num_slow)
    with ThreadPoolExecutor(NUM_OTHERS) as others:
        prompts = [f"quick {i}" for i in range(NUM_OTHERS)]
        assert list(others.map(lambda prompt: streamed_text(server, prompt), prompts)) == [answer(prompt) for prompt in prompts]
    engine.wait_for(lambda: engine.num_running == 0, 20)

    def held() -> tuple[list[int], list[int]]:
        streams = list(server.front.manager._streams.values())
        waiting = [protocol.transport.get_write_buffer_size() for protocol in server.server.server_state.connections]
        return [len(stream._changed) for stream in streams], waiting

    unread, waiting = server.on_loop(held)
    assert unread == [1] * num_slow  # all that came since the reader last looked, as one update
    assert max(waiting) <= WRITE_BUFFER_BOUND
    for i, connection in enumerate(slow):
        with connection:
            chunks = chunks_of(connection)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = answer(f"slow {i}")
        assert "".join(choice["text"] for choice in choices) == text
        ids = [token for choice in choices for token in choice.get("completion_token_ids") or []]
        assert bytes(token for token in ids if token < 256).decode() == (text if with_ids else "")
        assert len(chunks) < len(text)  # some of them hold many tokens
    assert engine.aborts == []
