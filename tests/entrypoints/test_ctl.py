"""``fastengine ctl``: every route has a command, and nothing that goes wrong is a traceback."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from fastengine.entrypoints.cli import main
from fastengine.entrypoints.control_routes import ROUTES
from fastengine.entrypoints.ctl import COMMANDS
from fastengine.protocol import control
from tests.server import free_port


def test_every_route_has_a_command():
    assert {path for _, path, _ in COMMANDS.values()} == {route.path for route in ROUTES if route.path.startswith("/v1/")}
    gets = {route.path for route in ROUTES if route.get}
    assert {path for method, path, _ in COMMANDS.values() if method == "GET"} <= gets


def test_a_command_reaches_the_engine(api, capsys):
    api.engine.commands.clear()
    assert main(["ctl", "--url", api.url, "profile", "action=start", "output_dir=/tmp/p"]) == 0
    assert [request.command for request in api.engine.commands] == [control.Profile(action="start", output_dir="/tmp/p")]
    assert '"status": "success"' in capsys.readouterr().out


def test_a_refusal_is_its_message(api, capsys):
    assert main(["ctl", "--url", api.url, "log-level", "level=LOUD"]) == 1
    assert one_line(capsys).startswith("fastengine ctl: log-level: 400: level")


@pytest.mark.parametrize(
    "url", ["notaurl", "", "data:,x", "http://[::1", "http://127.0.0.1:x", "http://a b", "http://a\nb", "file:///etc", "http://", "http://é"]
)
def test_bad_urls(url, capsys):
    assert main(["ctl", "--url", url, "pause"]) == 2
    assert "--url" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout", "-1", "pause"], "--timeout"),
        (["--timeout", "nan", "pause"], "--timeout"),
        (["--timeout", "inf", "pause"], "--timeout"),
        (["--key", "a\nb", "pause"], "--key"),
        (["--key", "ключ", "pause"], "--key"),
        (["pause", "mode"], "key=value"),
        (["pause", "=abort"], "key=value"),
        (["is-paused", "a=b"], "no arguments"),
        (["pause", "mode=drain", "mode=abort"], "mode is given twice"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    assert main(["ctl", "--url", f"http://127.0.0.1:{free_port()}", *arguments]) == 2
    assert words in one_line(capsys)


def test_a_dead_server(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["ctl", "--url", url, "pause"]) == 1
    assert f"{url} does not answer" in one_line(capsys)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "does not answer"),
        (b"hello\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<htm>", "not JSON: <htm>"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{", "broke its reply off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", "broke its reply off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff", "not JSON"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 9\r\n\r\na\nb\nc\x1b[0m", "502: a b c"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 99\r\n\r\na", "502: Bad Gateway"),
        (b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 13\r\n\r\n{"error": {}}', "401: "),
    ],
)
def test_replies_that_make_no_sense(reply, words, capsys):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(9999)
            connection.sendall(reply)
            # Closing with bytes unread would reset the connection, and take the reply away with it.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(9999):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    assert main(["ctl", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "5", "pause"]) == 1
    thread.join()
    assert words in one_line(capsys)


def test_a_reply_that_is_reset_half_way(capsys):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(9999)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{")
            began.wait(5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    began = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    threading.Timer(0.2, began.set).start()  # either way of ending gives the same line
    assert main(["ctl", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "5", "pause"]) == 1
    thread.join()
    assert "broke its reply off" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line
