"""Whatever comes in at the port gets a defined answer, in its turn, and takes a bounded amount of memory."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from fastengine.frontend.strict_protocol import MAX_HEADER_BYTES, MAX_PIPELINED, MAX_URL_BYTES
from tests.frontend.harness import ApiServer
from tests.frontend.test_connections import connect

BODY = b'{"prompt":"x","max_tokens":3}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ONE_CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
LAST = HEALTH + b"Connection: close\r\n\r\n"
STREAM = b'{"prompt":"x","max_tokens":30,"stream":true,"ignore_eos":true}'
STREAMED = POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM
# What Java's HttpClient and curl --http2 send.
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def replies(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies (status, headers, body) that ``data`` is made of, to its last byte."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(each.lower().split(": ", 1) for each in lines)
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            size = -1
            while size:
                length, _, data = data.partition(b"\r\n")
                size = int(length, 16)
                body, data = body + data[:size], data[size + 2 :]
        elif status != "100":
            size = int(headers["content-length"])
            body, data = data[:size], data[size:]
        found.append((int(status), headers, body))
    return found


def received(connection: socket.socket) -> bytes:
    """All until the server closes, which is a reset where it has not read all there was."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return bytes(data)


def ask(server: ApiServer, *pieces: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """All replies until the server closes the connection."""
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # the reply may come before all is sent
            for piece in pieces:
                connection.sendall(piece)
        return replies(received(connection))


def error_of(reply: tuple[int, dict[str, str], bytes]) -> str:
    """The message of an OpenAI error object that ends a connection."""
    status, headers, body = reply
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error" if status != 429 else "rate_limit_error")
    return error["message"]


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"hello\r\n\r\n", 400, "no valid HTTP"),
        (b"\x00\x01\x02\x03", 400, "no valid HTTP"),
        (b"GET v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400, "url"),
        (b"GET http:///v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400, "not a valid URL"),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "url"),
        (b"GET /v1/models HTTP/3.7\r\nHost: x\r\n\r\n", 400, "version"),
        (b"GET /v1/models HTTP/2.0\r\nHost: x\r\n\r\n", 505, "HTTP/2.0 is not spoken"),
        (b"GET /v1/models\r\n\r\n", 505, "HTTP/0.9 is not spoken"),
        (b"CONNECT a.b:443 HTTP/1.1\r\nHost: x\r\n\r\n", 501, "CONNECT"),
        (HEALTH + b"Host: y\r\n\r\n", 400, "Host: "),
        (HEALTH + b"A b: c\r\n\r\n", 400, "header"),
        (HEALTH + b"A: c\r\n d\r\n\r\n", 400, "header value"),
        (HEALTH + b"A: c\0d\r\n\r\n", 400, "header value"),
        (HEALTH + b"A : c\r\n\r\n", 400, "header"),
        (HEALTH + b"A: b\rC: d\r\n\r\n", 400, "header"),
        (HEALTH.replace(b"\r\n", b"\n") + b"\n", 400, "CRLF"),
        (POST + LENGTH * 2 + b"\r\n" + BODY, 400, "Duplicate Content-Length"),
        (POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY, 400, "Duplicate Content-Length"),
        (POST + b"Content-Length: 5, 5\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: +5\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: -5\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400, "Content-Length"),
        (POST + b"Content-Length: 99999999999\r\n\r\n", 413, "larger than"),
        (POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n", 400, "Content-Length"),
        (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 501, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, "Transfer-Encoding"),
        (CHUNKED + b"zz\r\n", 400, "chunk size"),
        (CHUNKED + b'5\r\n{"mod\r\n-1\r\n', 400, "chunk size"),
        (CHUNKED + ONE_CHUNK.replace(b"\r\n", b"\n") + b"0\n\n", 400, "chunk size"),
        (POST + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, 415, "Content-Encoding: gzip"),
        (b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "target"),
        (HEALTH + b"A: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n", 431, "headers"),
        (HEALTH + b"A: b\r\n" * (MAX_HEADER_BYTES // 2) + b"\r\n", 431, "headers"),
    ],
)
def test_what_is_not_http_gets_an_error_object(api: ApiServer, data: bytes, status: int, message: str) -> None:
    for pieces in ((data,), (data[: len(data) // 2], data[len(data) // 2 :])):
        (reply,) = ask(api, *pieces)
        assert reply[0] == status
        assert message in error_of(reply)


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 505, "HTTP/2 is not spoken"),
        (b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 501, "FOO is no method"),
    ],
)
def test_other_protocols_are_called_by_their_name(api: ApiServer, data: bytes, status: int, message: str) -> None:
    (reply,) = ask(api, data)
    assert reply[0] == status
    assert message in error_of(reply)


def test_refusals_are_counted(start_server) -> None:
    server = start_server()
    ask(server, b"hello\r\n\r\n")
    ask(server, b"FOO / HTTP/1.1\r\n\r\n")
    metrics = server.http.get("/metrics").text
    assert 'fastengine:http_requests_total{route="other",status="400"} 1' in metrics
    assert 'fastengine:http_requests_total{route="other",status="501"} 1' in metrics


@pytest.mark.parametrize(
    "data",
    [
        POST + UPGRADE + LENGTH + b"\r\n" + BODY,
        POST + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n" + ONE_CHUNK + b"0\r\n\r\n",
        CHUNKED + ONE_CHUNK + b"0\r\nX-After: all\r\n\r\n",
        POST.replace(b" /v1", b" http://x/v1") + LENGTH + b"\r\n" + BODY,
        b"\r\n" + POST + LENGTH + b"\r\n" + BODY,
    ],
)
def test_a_request_is_understood_at_any_split(api: ApiServer, data: bytes) -> None:
    """Among them those that ask for HTTP/2, which a server may decline, and whose bodies then must not be lost."""
    for place in range(1, len(data), 3):
        answer, health = ask(api, data[:place], data[place:] + LAST)
        assert answer[0] == 200
        assert json.loads(answer[2])["usage"]["completion_tokens"] == 3
        assert health[0] == 200


def test_an_absolute_target_without_a_path_is_the_root(api: ApiServer) -> None:
    (reply,) = ask(api, b"GET http://x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert reply[0] == 404
    assert json.loads(reply[2])["error"]["message"] == "there is no / here"


def test_a_body_in_tiny_chunks_is_taken(api: ApiServer) -> None:
    body = BODY[:-1] + b" " * 40_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer, _ = ask(api, CHUNKED + chunks + b"0\r\n\r\n" + LAST)
    assert answer[0] == 200


def test_a_chunked_body_past_the_limit_is_a_413(start_server) -> None:
    server = start_server(max_body_mib=0.25)
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"10000\r\n%b\r\n" % (b" " * 0x10000) * 5)
        (reply,) = replies(received(connection))
    assert reply[0] == 413
    assert "0.25 MiB" in error_of(reply)


def test_continue_is_said_to_those_who_wait_for_it(api: ApiServer) -> None:
    with connect(api) as connection:
        connection.sendall(POST + LENGTH + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        (reply,) = replies(received(connection))
    assert reply[0] == 200
    (reply,) = ask(api, POST + b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n")
    assert reply[0] == 413  # without being asked for


def test_a_trailer_is_no_header(start_server) -> None:
    server = start_server(api_key=("secret",), wait=False)
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    (reply,) = ask(server, head + ONE_CHUNK + b"0\r\nAuthorization: Bearer secret\r\n\r\n")
    assert reply[0] == 401


def test_a_reply_under_way_is_not_cut_into(start_server) -> None:
    """Neither by what can't be read behind its request, nor by the body of another one that breaks."""
    server = start_server()
    server.engine.step_s = 0.005
    for rest in (b"\x01 nonsense\r\n\r\n", CHUNKED + b"zz\r\n", POST + LENGTH * 2 + b"\r\n"):
        streamed, refused = ask(server, STREAMED, rest)
        assert streamed[0] == 200
        *events, done = [event.removeprefix(b"data: ") for event in streamed[2].split(b"\n\n")[:-1]]
        assert done == b"[DONE]"
        assert sum(len(json.loads(event)["choices"][0]["text"]) for event in events) == 30  # on a busy machine, several of the tokens in one
        assert refused[0] == 400
        assert error_of(refused)


def test_requests_before_a_broken_one_are_answered(api: ApiServer) -> None:
    *answered, refused = ask(api, (HEALTH + b"\r\n") * 3 + POST + LENGTH + b"\r\n" + BODY + b"\x01\x02\r\n\r\n" + HEALTH)
    assert [reply[0] for reply in answered] == [200] * 4
    assert refused[0] == 400


def test_only_so_many_requests_wait_on_a_connection(start_server) -> None:
    server = start_server()
    server.engine.step_s = 0.005
    *answered, refused = ask(server, STREAMED, (HEALTH + b"\r\n") * 3 * MAX_PIPELINED)
    assert [reply[0] for reply in answered] == [200] * (1 + MAX_PIPELINED)
    assert refused[0] == 429
    assert refused[1]["retry-after"] == "1"
    assert f"{MAX_PIPELINED} requests wait" in error_of(refused)


def num_bytes_taken(connection: socket.socket, piece: bytes) -> int:
    """How many could be sent until the server had enough."""
    sent, deadline = 0, time.monotonic() + 20
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < deadline:
            connection.sendall(piece)
            sent += len(piece)
        pytest.fail("it could go on for ever")
    return sent


@pytest.mark.parametrize(
    ("begin", "endless", "status"),
    [
        (b"GET /", b"a" * 65536, 414),
        (HEALTH + b"A: ", b"a" * 65536, 431),
        (HEALTH, b"A: b\r\n" * 10000, 431),
        (CHUNKED + ONE_CHUNK + b"0\r\nA: ", b"a" * 65536, 400),
        (CHUNKED + b"5;a=", b"a" * 65536, 400),
    ],
)
def test_nothing_is_taken_without_end(api: ApiServer, begin: bytes, endless: bytes, status: int) -> None:
    with connect(api) as connection:
        connection.sendall(begin)
        assert num_bytes_taken(connection, endless) < 16 << 20  # what the kernel holds for both sides, and a read or two
        reply = received(connection)  # if the kernel has not thrown it away for the reset
        assert not reply or reply.startswith(b"HTTP/1.1 %d " % status)


def test_methods_and_paths_that_are_not_there(api: ApiServer) -> None:
    for method in ("PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "PROPFIND", "GET", "HEAD"):
        reply = api.http.request(method, "/v1/completions")
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            assert reply.json()["error"]["code"] == "method_not_allowed"
    assert api.http.put("/v1/models").headers["allow"] == "GET, HEAD"
    meant = {
        "/v1/completions/": "/v1/completions",
        "/v1//completions": "/v1/completions",
        "/chat/completions": "/v1/chat/completions",
        "/v1/health": "/health",
    }
    for path, right in meant.items():
        reply = api.http.post(path, json={})
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == f"there is no {path} here: it is {right}"
    reply = api.http.post("/v2/" + "a" * 1000)
    assert reply.json()["error"]["type"] == "not_found_error"
    assert len(reply.content) < 400


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/metrics", "/nowhere"])
def test_head_is_get_without_the_body(api: ApiServer, path: str) -> None:
    got = api.http.get(path)
    reply = api.http.head(path)
    assert reply.status_code == got.status_code
    assert reply.headers["content-type"] == got.headers["content-type"]
    assert reply.content == b""
    assert api.http.get("/health").status_code == 200  # the connection is as it should be


def test_a_stream_of_http_1_0_ends_with_its_connection(start_server):
    """There are no chunks in it: what came first in each would be text to such a client."""
    server = start_server()
    server.engine.step_s = 0.005  # so that it comes in several pieces
    with connect(server) as connection:
        connection.sendall(STREAMED.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events) == "x" * 30


def test_a_whole_reply_of_http_1_0_has_a_length(api):
    with connect(api) as connection:
        connection.sendall(POST.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH + b"\r\n" + BODY)
        ((status, headers, body),) = replies(received(connection))
    assert status == 200
    assert headers["connection"] == "close"
    assert json.loads(body)["usage"]["completion_tokens"] == 3
