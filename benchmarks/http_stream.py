"""A light HTTP/1.1 client for streamed replies: the load generator shares the cores with what it measures.

Bytes go through two incremental parsers, :class:`ResponseParser` (status, headers, chunked or plain
body) and :class:`SseParser` (server-sent events), once per socket read; nothing is awaited per event.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
MAX_HEADER_BYTES = 1 << 16


class HttpProtocolError(Exception):
    """The peer closed the connection in the middle of a reply, or does not speak HTTP/1.1."""


class HttpStatusError(Exception):
    """A reply whose status is not 200."""

    def __init__(self, status: int, body: bytes):
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Where a server is: ``prefix`` is the URL's path, without ``/v1`` and without a closing slash."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises ValueError unless ``url`` is an http or https URL with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, prefix)


class ResponseParser:
    """One reply, fed in pieces of any size; ``status`` is 0 until the headers are complete."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keep_alive = True
        self._buffer = bytearray()
        self._chunked = False
        # Body bytes still to come: of the whole body, or of the current chunk. None: until the peer closes.
        self._remaining: int | None = 0
        self._after_chunk = False

    def feed(self, data: bytes) -> bytes:
        """Take what was read from the socket; returns the body bytes in it."""
        self._buffer += data
        if not self.status and not self._parse_head():
            return b""
        return self._take_chunks() if self._chunked else self._take_plain()

    def end_of_input(self) -> None:
        """The peer closed. Raises HttpProtocolError unless that is how this reply ends."""
        if not self.status or self._chunked or self._remaining is not None:
            raise HttpProtocolError("the connection closed in the middle of a reply")
        self.done, self.keep_alive = True, False

    def _parse_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise HttpProtocolError("the reply's headers do not end")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise HttpProtocolError(f"not an HTTP/1.1 status line: {first[:80]!r}")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(words[1])
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self.keep_alive = headers.get("connection", "keep-alive" if words[0] == "HTTP/1.1" else "close") != "close"
        if not self._chunked:
            self._remaining = int(headers["content-length"]) if "content-length" in headers else None
        return True

    def _take_plain(self) -> bytes:
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._remaining is not None:
            self._remaining -= len(body)
            self.done = self._remaining <= 0
        return body

    def _take_chunks(self) -> bytes:
        """``SIZE CRLF bytes CRLF ... 0 CRLF CRLF``; trailers are not supported."""
        out = bytearray()
        buffer, at = self._buffer, 0
        while not self.done:
            if self._remaining:
                piece = buffer[at : at + self._remaining]
                if not piece:
                    break
                out += piece
                at += len(piece)
                self._remaining -= len(piece)
                self._after_chunk = True
                continue
            start = at + 2 if self._after_chunk else at
            end = buffer.find(b"\r\n", start)
            if end < 0:
                break
            size = int(buffer[start:end].split(b";")[0], 16)
            if size == 0 and len(buffer) < end + 4:
                break
            self._remaining, self._after_chunk, self.done = size, False, size == 0
            at = end + 2 if size else end + 4
        del buffer[:at]
        return bytes(out)


class SseParser:
    """The ``data:`` payloads of a stream of server-sent events, fed in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Connection:
    """One kept-alive connection that carries one request at a time."""

    def __init__(self, endpoint: Endpoint, headers: dict[str, str]):
        self._endpoint = endpoint
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def fetch(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The whole body of a reply. Raises HttpStatusError, HttpProtocolError, OSError."""
        return b"".join([data async for _, data in self._exchange(method, path, body)])

    async def events(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        """POST, then each event's payload with the time its last byte was read (``time.perf_counter()``).

        Raises HttpStatusError, HttpProtocolError, OSError.
        """
        sse = SseParser()
        async for read_at, data in self._exchange("POST", path, body):
            for payload in sse.feed(data):
                yield read_at, payload

    async def close(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):  # the peer has gone first
                await writer.wait_closed()

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        parser = ResponseParser()
        error_body = b""
        data = await self._send(method, path, body)
        try:
            while True:
                read_at = time.perf_counter()
                if not data:
                    parser.end_of_input()
                    break
                piece = parser.feed(data)
                if parser.status != 200:
                    error_body += piece
                elif piece:
                    yield read_at, piece
                if parser.done:
                    break
                assert self._reader is not None
                data = await self._reader.read(READ_BYTES)
        finally:
            # A reply that was not read to its end leaves bytes behind: the connection can't be used again.
            if not (parser.done and parser.keep_alive):
                await self.close()
        if parser.status != 200:
            raise HttpStatusError(parser.status, error_body)

    async def _send(self, method: str, path: str, body: bytes) -> bytes:
        """Send the request and return the first bytes of the reply.

        A kept-alive connection may have been closed by the server meanwhile: then once more on a new one.
        """
        address = f"{self._endpoint.host}:{self._endpoint.port}"
        head = f"{method} {self._endpoint.prefix}{path} HTTP/1.1\r\nHost: {address}\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        if self._writer is not None:
            with contextlib.suppress(OSError):
                if data := await self._write_and_read(head.encode() + body):
                    return data
            await self.close()
        tls = ssl.create_default_context() if self._endpoint.tls else None
        self._reader, self._writer = await asyncio.open_connection(self._endpoint.host, self._endpoint.port, ssl=tls)
        return await self._write_and_read(head.encode() + body)

    async def _write_and_read(self, request: bytes) -> bytes:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(request)
        await self._writer.drain()
        return await self._reader.read(READ_BYTES)
