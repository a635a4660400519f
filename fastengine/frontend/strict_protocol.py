"""HTTP as it may come in: bounds on what precedes and surrounds a body, and an error object for whatever isn't HTTP.

uvicorn's protocol answers a request that its parser rejects with a line of text, at once, be it in the middle of another
reply. Here it is OpenAI's error object, in its turn::

    request 1 | request 2 | not HTTP        nothing after it is read
        ▼           ▼           ▼
     reply 1     reply 2     400, close

The parser takes in heads, trailers and chunk extensions without end; what is allowed of these stands below.
"""

from __future__ import annotations

import json
import logging
import re
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from fastengine.frontend.errors import ApiError

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 16 * 1024
MAX_HEADER_BYTES = 64 * 1024
# Requests of one connection that wait behind the one being answered.
MAX_PIPELINED = 128
# A chunk of one byte takes six.
FRAMING_PER_BYTE = 6
VERSIONS = ("1.1", "1.0")
HTTP2_PREFACE = b"PRI * HTTP/2.0"
TLS_HANDSHAKE = b"\x16\x03"
REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}) \S+ HTTP/1")


class Part(Enum):
    """What of a request is being read."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class StrictProtocol(HttpToolsProtocol):
    """One connection. Subclasses hear of its requests in :meth:`head_read`, :meth:`request_read` and :meth:`refuse`."""

    parser: httptools.HttpRequestParser
    url: bytes

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None):
        super().__init__(config, server_state, app_state, _loop)
        self._running: RequestResponseCycle | None = None  # the oldest one, which is being answered
        self._refusal: ApiError | None = None  # what is said when it is its turn
        self._part = Part.NOTHING
        self._num_begun = 0  # requests
        self._head_bytes = 0
        self._body_bytes = 0  # within one read
        self._around_bytes = 0  # of the request being read: all but its body and a body's ordinary framing

    # -- reading ------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refusal is not None or self.parser is None:
            return
        num_begun = self._num_begun
        try:
            self._feed(data)
        except (httptools.HttpParserError, ApiError) as error:
            # What is wrong stands at the beginning of ``data`` only if that is where its request begins.
            begin = data if self._num_begun == num_begun + 1 else b""
            self._refuse_in_turn(error if isinstance(error, ApiError) else meaning(error, begin))

    def _feed(self, data: bytes) -> None:
        num_begun, self._body_bytes = self._num_begun, 0
        rest = data
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._without_upgrade() + rest[upgrade.args[0] :]
        if self._num_begun != num_begun or self._part is Part.NOTHING:
            self._around_bytes = 0
            return
        self._around_bytes = max(0, self._around_bytes + len(data) - FRAMING_PER_BYTE * self._body_bytes)
        if self._around_bytes > MAX_HEADER_BYTES:
            if self._part is Part.BODY:
                raise ApiError(400, f"what surrounds the request's body (chunk extensions, trailers) is larger than {MAX_HEADER_BYTES // 1024} KiB")
            raise headers_too_large()

    def _without_upgrade(self) -> bytes:
        """The head just read once more, as it is when nobody asks for another protocol.

        A server is free not to change protocols, and then answers the request itself. But the parser, once it has seen the
        question, takes what follows the head, which may be a body, for the other protocol. (Java's HttpClient asks for
        HTTP/2 with each first request.)
        """
        version = self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._num_begun -= 1
        lines = [b"%b %b HTTP/%b" % (self.scope["method"].encode(), self.url, version.encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings")]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = Part.HEAD
        self._num_begun += 1
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise ApiError(414, f"the request's target is longer than {MAX_URL_BYTES // 1024} KiB")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is Part.BODY:
            return  # a trailer: it comes too late to mean anything, and must not pass for a header
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEADER_BYTES:
            raise headers_too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        self._check_head()
        super().on_headers_complete()
        self._part = Part.BODY
        if self._running is None or self._running.response_complete:
            self._running = self.cycle
        self.head_read()

    def _decline_upgrade(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ApiError(501, "CONNECT: this is no proxy")
        self.scope["method"] = method.decode("ascii")

    def _check_head(self) -> None:
        """Raises ApiError for what the parser takes and no reader here would understand as it is meant."""
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            raise ApiError(505, f"HTTP/{version} is not spoken here: use HTTP/1.1")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if any(coding.strip().lower() != b"chunked" for coding in codings):
            raise ApiError(501, "Transfer-Encoding: only 'chunked' is understood")
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ApiError(400, "Host: the header stands there more than once")
        if not self.url.startswith(b"/"):
            self.url = origin_form(self.url)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(429, f"{MAX_PIPELINED} requests wait on this connection, the most that may", retry_after_s=1)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its head comes once more
        self._part = Part.NOTHING
        self.request_read()
        super().on_message_complete()

    def head_read(self) -> None:
        """``self.cycle`` has begun."""

    def request_read(self) -> None:
        """Its last byte has come."""

    # -- refusing -----------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        self._refuse_if_due()

    def _refuse_in_turn(self, error: ApiError) -> None:
        self._refusal = error
        if self._part is Part.BODY and not self._let_go(self.cycle):
            return
        self._refuse_if_due()

    def _let_go(self, broken: RequestResponseCycle) -> bool:
        """Nobody needs to answer a request whose body can't be read; False if somebody has begun to."""
        if broken.response_started:
            self.transport.close() if broken.response_complete else self.transport.abort()
            return False
        if self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()
        broken.disconnected = True
        broken.message_event.set()
        return True

    def _refuse_if_due(self) -> None:
        running = self._running
        is_free = running is None or running.response_complete or running.disconnected
        if self._refusal is not None and is_free and not self.pipeline and not self.transport.is_closing():
            self.refuse(self._refusal)

    def refuse(self, error: ApiError) -> None:
        """Answer with ``error`` and close the connection."""
        body = json.dumps(error.body()).encode()
        head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
        if error.retry_after_s is not None:
            head += b"retry-after: %d\r\n" % error.retry_after_s
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


def headers_too_large() -> ApiError:
    return ApiError(431, f"the request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB")


def origin_form(url: bytes) -> bytes:
    """The path and query of a target that begins with no slash: an absolute URL, as it is sent to proxies, or ``*``."""
    parsed = httptools.parse_url(url)
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")


def meaning(error: httptools.HttpParserError, begin: bytes) -> ApiError:
    """What a client is told of an error of the parser; ``begin`` is the request's beginning, if it is known."""
    cause = error.__context__
    if isinstance(cause, ApiError):  # of a callback here
        return cause
    if isinstance(cause, (httptools.HttpParserInvalidURLError, UnicodeError)):
        return ApiError(400, "the request's target is not a valid URL")
    if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
        logger.error("a request could not be taken in", exc_info=cause)
        return ApiError(500, "internal error while the request was read")
    if begin.startswith(HTTP2_PREFACE):
        return ApiError(505, "HTTP/2 is not spoken here: use HTTP/1.1")
    if begin.startswith(TLS_HANDSHAKE):
        return ApiError(400, "this is no HTTP request but the beginning of TLS, which is not spoken at this port: use http://")
    line = REQUEST_LINE.match(begin)
    if isinstance(error, httptools.HttpParserInvalidMethodError) and line:
        return ApiError(501, f"{line.group(1).decode()} is no method that is known here")
    return ApiError(400, f"this is no valid HTTP request: {str(error)[:200] or 'it ends in the middle'}")
