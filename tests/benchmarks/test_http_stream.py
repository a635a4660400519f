"""The load generator's HTTP and SSE parsers give the same result however the bytes are cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from http_stream import Endpoint, HttpProtocolError, ResponseParser, SseParser

EVENTS = [b'{"a": 1}', b'{"text": "caf\xc3\xa9\\r\\n"}', b"[DONE]"]
SSE = b"".join(b"data: " + event + b"\n\n" for event in EVENTS)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"", 0
    for size in [*sizes, len(body)]:
        piece = body[at : at + size]
        at += size
        if piece:
            out += b"%x\r\n" % len(piece) + piece + b"\r\n"
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + out + b"0\r\n\r\n"


def parse(pieces: list[bytes]) -> tuple[ResponseParser, list[bytes]]:
    parser, sse = ResponseParser(), SseParser()
    events: list[bytes] = []
    for piece in pieces:
        assert not parser.done
        events += sse.feed(parser.feed(piece))
    return parser, events


def test_every_cut_of_a_chunked_reply_gives_the_same_events() -> None:
    reply = chunked(SSE, [1, 7, 20])
    for cut in range(1, len(reply)):
        parser, events = parse([reply[:cut], reply[cut:]])
        assert events == EVENTS
        assert parser.done
        assert parser.keep_alive


@given(sizes=st.lists(st.integers(1, 30), max_size=8), cuts=st.lists(st.integers(1, 200), max_size=10))
def test_any_chunks_and_any_reads_give_the_same_events(sizes: list[int], cuts: list[int]) -> None:
    reply = chunked(SSE, sizes)
    bounds = sorted({cut for cut in cuts if cut < len(reply)})
    pieces = [reply[a:b] for a, b in zip([0, *bounds], [*bounds, len(reply)], strict=True)]
    parser, events = parse(pieces)
    assert events == EVENTS
    assert parser.done


def test_a_reply_with_a_length_ends_at_it() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nConnection: close\r\n\r\nhel") == b"hel"
    assert not parser.done
    assert parser.feed(b"lo") == b"lo"
    assert (parser.done, parser.status, parser.keep_alive) == (True, 404, False)


def test_a_reply_without_a_length_ends_when_the_peer_closes() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"\r\nabc") == b"abc"
    assert not parser.done
    parser.end_of_input()
    assert parser.done
    assert not parser.keep_alive


@pytest.mark.parametrize("start", [b"", HEAD, chunked(SSE, [])[:-5], b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
def test_a_peer_that_closes_early_is_an_error(start: bytes) -> None:
    parser = ResponseParser()
    parser.feed(start)
    with pytest.raises(HttpProtocolError, match="middle of a reply"):
        parser.end_of_input()


def test_what_is_not_http_is_an_error() -> None:
    with pytest.raises(HttpProtocolError, match="status line"):
        ResponseParser().feed(b"SSH-2.0-OpenSSH\r\n\r\n")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8188", Endpoint("127.0.0.1", 8188, False, "")),
        ("http://localhost:8188/v1/", Endpoint("localhost", 8188, False, "")),
        ("https://example.org/llm/v1", Endpoint("example.org", 443, True, "/llm")),
    ],
)
def test_urls(url: str, expected: Endpoint) -> None:
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8188", "ftp://host", "http://"])
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        Endpoint.parse(url)
