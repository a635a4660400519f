"""Connections that end early, dawdle, or are too many; and the end of the server with requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import select
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastengine.frontend.http_protocol import TimedProtocol
from fastengine.frontend.http_server import SPARE_DESCRIPTORS, TOLD_SO, allowed_connections
from tests.frontend.harness import ApiServer
from tests.frontend.test_disconnect import CHAT, open_request
from tests.server import wait_until

COMPLETION = {"prompt": "x", "max_tokens": 3}
LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
TLS = Path(__file__).parent / "tls"
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(autouse=True)
def expected_log(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines a test expects; none unless it says so: what clients do is no business of the log's."""
    expected: list[str] = []
    yield expected
    records = [record for record in caplog.get_records("call") if record.levelno > logging.DEBUG and record.name != "httpx"]
    assert [record.getMessage().partition(":")[0] for record in records] == expected
    assert not any(record.exc_info for record in records)


def connect(server: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10)


def received(connection: socket.socket) -> bytes:
    """All until the server closes."""
    data = bytearray()
    while piece := connection.recv(65536):
        data += piece
    return bytes(data)


def num_connections(server: ApiServer) -> int:
    return server.on_loop(lambda: len(server.server.server_state.connections))


def is_closed(connection: socket.socket, within_s: float) -> bool:
    ready, _, _ = select.select([connection], [], [], within_s)
    return bool(ready) and connection.recv(65536) == b""


@contextlib.contextmanager
def tls_server(**flags: Any) -> Iterator[tuple[ApiServer, httpx.Client]]:
    """A server whose certificate was made for these tests, and is good for nothing else, and a client that trusts it."""
    certificate, key = TLS / "cert.pem", TLS / "key.pem"
    directory = tempfile.TemporaryDirectory()  # pytest's have names too long for sockets
    server = ApiServer(Path(directory.name), ssl_certfile=str(certificate), ssl_keyfile=str(key), **flags)
    try:
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url.replace("http:", "https:"), verify=trust, timeout=20) as client:
            yield server, client
    finally:
        server.stop()
        directory.cleanup()


@pytest.fixture
def soon_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose request does not come is closed a moment after its time, not a second."""
    monkeypatch.setattr("fastengine.frontend.http_protocol.CLOSE_MARGIN_S", 0.1)


@pytest.fixture(params=["uvloop", "asyncio"])
def event_loop_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both that an API process may run on: they shake hands each in its own way."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(pytest.importorskip("uvloop").EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.mark.usefixtures("event_loop_kind")
def test_a_tls_handshake_has_a_bound_of_its_own() -> None:
    with tls_server(request_read_timeout=0.5) as (server, client):
        silent = [connect(server) for _ in range(3)]
        assert client.get("/health").status_code in (200, 503)  # before its engine is there, or after
        # Far below the minute that is asyncio's own bound.
        assert all(is_closed(connection, 20) for connection in silent)


@pytest.mark.usefixtures("event_loop_kind")
def test_tls_handshakes_count_as_connections() -> None:
    with tls_server(max_connections=3, request_read_timeout=20) as (server, client):
        assert client.get("/version").status_code == 200  # it is kept open: one of three
        silent = [connect(server) for _ in range(2)]
        with httpx.Client(base_url=client.base_url, verify=False) as one_more:
            reply = one_more.get("/version")
        assert (reply.status_code, reply.headers["connection"]) == (503, "close")
        assert client.get("/version").status_code == 200
        silent += [connect(server) for _ in range(TOLD_SO + 2)]
        # No hand is shaken any more: the newest are closed at once.
        assert is_closed_or_reset(silent[-1], 10)
        assert not is_closed_or_reset(silent[0], 0)
        for connection in silent:
            connection.close()
        wait_until(lambda: server.on_loop(server.server._num_handshakes) == 0, 10, "the end of all handshakes")
        with httpx.Client(base_url=client.base_url, verify=False) as one_more:
            assert one_more.get("/version").status_code == 200


@pytest.mark.usefixtures("event_loop_kind", "soon_closed")
def test_tls_connections_that_are_refused_do_not_stay() -> None:
    """Nor those that are closed for their silence: whoever does not say goodbye would count for half a minute."""
    with tls_server(max_connections=3, request_read_timeout=0.3) as (server, client):
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        silent = [context.wrap_socket(connect(server), server_hostname="127.0.0.1") for _ in range(9)]
        wait_until(lambda: not server.server.server_state.connections, 10, "the end of all connections")
        assert client.get("/version").status_code == 200
        for connection in silent:
            connection.close()


@pytest.mark.usefixtures("event_loop_kind")
def test_what_comes_with_the_handshakes_end_is_not_lost() -> None:
    with tls_server() as (server, _):
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        for _ in range(5):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            shaking = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with connect(server) as connection:
                while True:
                    try:
                        shaking.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        connection.sendall(outgoing.read())
                        incoming.write(connection.recv(65536))
                shaking.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                connection.sendall(outgoing.read())  # the last words of the handshake, and the request
                reply = b""
                while not reply.endswith(b"}"):
                    incoming.write(connection.recv(65536))
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while piece := shaking.read(65536):
                            reply += piece
                assert reply.startswith(b"HTTP/1.1 200")


def is_closed_or_reset(connection: socket.socket, within_s: float) -> bool:
    try:
        return is_closed(connection, within_s)
    except ConnectionResetError:
        return True


def answers(server: ApiServer) -> bool:
    return server.http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/generate", "/v1/score", "/tokenize"]
)
def test_a_client_that_goes_away_while_it_sends(start_server, path: str, reset: bool) -> None:
    server = start_server()
    for piece in (b"", HEAD[:30], HEAD.replace(b"/v1/completions", path.encode()) + b'{"mo'):
        connection = connect(server)
        connection.sendall(piece)
        time.sleep(0.02)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
    assert answers(server)


# uvicorn reads no further while a pipelined request waits: then only writing tells that the client has gone.
@pytest.mark.parametrize(("stream", "pipelined"), [(False, False), (True, False), (True, True)])
def test_a_client_that_goes_away_while_it_is_answered(start_server, stream: bool, pipelined: bool) -> None:
    server = start_server()
    server.engine.step_s = 0.001
    for _ in range(5):
        connection = open_request(server, {**CHAT, "stream": stream})
        if pipelined:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        if stream:
            connection.recv(100)
        else:
            server.engine.wait_for(lambda: server.engine.num_running == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
        server.engine.wait_for(lambda: server.engine.num_running == 0)
    assert answers(server)


@pytest.fixture
def earlier_objects_aside() -> Iterator[None]:
    """What is there already is not looked at, which would take longer than the test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("earlier_objects_aside")
def test_a_client_that_resets_an_idle_connection_leaves_nothing(start_server) -> None:
    server = start_server()
    assert answers(server)

    def connections() -> list[TimedProtocol]:
        gc.collect()
        return [item for item in gc.get_objects() if isinstance(item, TimedProtocol)]

    others = set(connections())
    assert others  # the client's own
    for _ in range(20):
        connection = connect(server)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
    wait_until(lambda: others.issuperset(connections()), 10, "the end of what stood for the connections")


def test_a_body_that_does_not_come_is_a_408(start_server) -> None:
    server = start_server(request_read_timeout=0.3)
    connection = connect(server)
    connection.sendall(HEAD + b'{"mo')
    reply = received(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"
    assert "--request-read-timeout" in error["message"]
    assert answers(server)


def test_headers_that_do_not_come_close_the_connection(start_server) -> None:
    server = start_server(request_read_timeout=0.2)
    silent, halting = connect(server), connect(server)
    halting.sendall(HEAD[:40])
    assert received(halting).startswith(b"HTTP/1.1 408 ")
    assert is_closed(silent, 5)


def trickle(connection: socket.socket) -> None:
    """A body that never ends, byte by byte. Raises OSError when the server has had enough."""
    connection.sendall(HEAD.replace(b"500", b"500000"))
    ended_at = time.monotonic() + 10
    while time.monotonic() < ended_at:
        connection.sendall(b" ")
        time.sleep(0.02)


def test_a_trickle_does_not_keep_a_connection(start_server) -> None:
    server = start_server(request_read_timeout=0.3)
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        trickle(connect(server))


@pytest.mark.usefixtures("soon_closed")
def test_a_second_request_on_a_connection_has_its_own_time(start_server) -> None:
    server = start_server(request_read_timeout=0.4)
    connection = connect(server)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(3):  # idle in between for longer than a request may take
        connection.sendall(request)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert not is_closed(connection, 0.7)


@pytest.mark.usefixtures("soon_closed")
def test_a_long_answer_is_not_cut_off(start_server) -> None:
    server = start_server(request_read_timeout=0.2)
    server.engine.step_s = 0.02
    connection = open_request(server, {**CHAT, "max_tokens": 40, "stream": True})
    connection.sendall(b"\r\nGET /heal")  # the beginning of another
    reply = bytearray()
    while b"[DONE]" not in reply:
        piece = connection.recv(65536)
        assert piece
        reply += piece


def test_only_so_many_connections(start_server) -> None:
    server = start_server(max_connections=5)
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=20)
    held = [connect(server) for _ in range(5)]
    wait_until(lambda: num_connections(server) == 5, 10, "five connections are taken")
    refused = connect(server)
    reply = received(refused)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"5 connections are open" in reply
    for connection in held:
        connection.close()
    wait_until(lambda: num_connections(server) == 0, 10, "they are gone")
    assert answers(server)


def test_descriptors_bound_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (256, 1000)}
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda kind, wanted: limits.update(now=wanted))
    assert allowed_connections(500) == 500
    assert limits["now"] == (500 + SPARE_DESCRIPTORS, 1000)
    assert allowed_connections(5000) == 1000 - SPARE_DESCRIPTORS


def test_requests_are_told_when_the_drain_is_over(start_server, expected_log) -> None:
    expected_log.append("3 requests had not finished within 0.3 s (--shutdown-timeout)")
    server = start_server(shutdown_timeout=0.3)
    server.engine.step_s = 0.01
    replies: dict[str, httpx.Response] = {}

    def ask(name: str, path: str, body: dict[str, object]) -> None:
        replies[name] = httpx.post(server.url + path, json=body, timeout=20)

    asked = [
        ("whole", "/v1/completions", LONG),
        ("stream", "/v1/chat/completions", {**CHAT, "stream": True}),
        ("control", "/v1/pause", {"mode": "drain"}),
    ]
    clients = [threading.Thread(target=ask, args=each) for each in asked]
    for client in clients[:2]:
        client.start()
    server.engine.wait_for(lambda: server.engine.num_running == 2)
    server.engine.silent_control = True
    clients[2].start()
    server.engine.wait_for(lambda: bool(server.engine.commands))
    uploading = connect(server)
    uploading.sendall(HEAD + b'{"mo')
    time.sleep(0.05)
    began = time.monotonic()
    server.loop.call_soon_threadsafe(server.server.stop)
    for client in clients:
        client.join(10)
    server._thread.join(10)
    assert time.monotonic() - began < 3
    assert replies["whole"].status_code == 503
    assert "the server is shutting down" in replies["whole"].json()["error"]["message"]
    assert replies["whole"].headers["retry-after"]
    events = [line[6:] for line in replies["stream"].text.splitlines() if line]
    assert json.loads(events[-2])["error"]["message"] == "the server is shutting down"
    assert events[-1] == "[DONE]"
    assert replies["control"].status_code == 503
    assert b"503" in received(uploading)
    server.engine.wait_for(lambda: server.engine.num_running == 0)  # the aborts came through


def test_what_finishes_in_time_is_answered(start_server) -> None:
    server = start_server(shutdown_timeout=10)
    server.engine.step_s = 0.005
    replies: list[httpx.Response] = []
    client = threading.Thread(target=lambda: replies.append(httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 60}, timeout=20)))
    client.start()
    server.engine.wait_for(lambda: server.engine.num_running == 1)
    server.loop.call_soon_threadsafe(server.server.stop)
    client.join(10)
    server._thread.join(5)
    assert not server._thread.is_alive()
    assert replies[0].json()["usage"]["completion_tokens"] == 60
