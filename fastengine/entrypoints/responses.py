"""Replies written straight to ASGI: JSON bodies, error objects, and server-sent events at low cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastengine.entrypoints.error_formats import DONE_EVENT, error_body, error_event
from fastengine.frontend.errors import ApiError, ClientDisconnected
from fastengine.frontend.http_protocol import DIRECT_BODY, DirectBody
from fastengine.frontend.request_manager import GenerationStream

logger = logging.getLogger(__name__)
__all__ = ["DONE_EVENT", "EventStream", "EventWriter", "JsonReply", "error_reply", "interrupted_by_disconnect"]
# Errors after which the rest of the request is not read: the connection can't be used again.
UNREAD = frozenset({408, 413, 415})
# nginx would otherwise gather events before passing them on.
EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class JsonReply(Response):
    """Anything msgspec can encode, as ``application/json``."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_reply(error: ApiError, path: str, *, headers: Mapping[str, str] | None = None, request_id: str | None = None) -> JsonReply:
    """``path`` is the request's: its API decides what errors look like."""
    reply_headers = dict(headers or {})
    if error.retry_after_s is not None:
        reply_headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status in UNREAD:
        reply_headers["Connection"] = "close"
    if error.status == 401:
        reply_headers["WWW-Authenticate"] = "Bearer"
    return JsonReply(error_body(error, path, request_id), error.status, reply_headers)


class EventWriter:
    """Writes server-sent events; the HTTP status goes out with the first of them."""

    def __init__(self, send: Send, headers: Mapping[str, str], direct: DirectBody | None = None):
        """``direct``: the short way for what follows the first events, where the server has one."""
        self._send = send
        self.direct = direct
        self._headers = headers
        self.started = False
        self._ended = False

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """``last``: the reply ends with these, in the same piece: a client that waits for its end is woken once, not twice."""
        if self.started and not last and self.direct is not None and self.direct.write(events):
            return
        if not self.started:
            self.started = True
            extra = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + extra})
        self._ended = last
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def close(self) -> None:
        """End the reply unless its last events have."""
        if not self._ended:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Runs ``produce(receive, writer)`` as the reply's body.

    An ApiError before the first event becomes an ordinary HTTP error; later it is an error event,
    followed by ``[DONE]`` where OpenAI's API is spoken. ``request_id`` goes into the message of an unforeseen failure.
    """

    def __init__(self, produce: Callable[[Receive, EventWriter], Coroutine[Any, Any, None]], *, request_id: str, headers: Mapping[str, str]):
        self._produce = produce
        self._request_id = request_id
        self._extra_headers = headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, path = EventWriter(send, self._extra_headers, scope.get(DIRECT_BODY)), scope["path"]
        try:
            # In a task of its own: every token wakes its few frames, not those of all layers around them, too.
            await asyncio.create_task(self._produce(receive, writer))
        except ClientDisconnected:
            logger.debug("%s: the client disconnected", self._request_id)
            return
        except ApiError as error:
            if not writer.started:
                await error_reply(error, path, headers=self._extra_headers)(scope, receive, send)
                return
            await writer.write(error_event(error, path))
        except Exception:
            if not writer.started:
                raise
            logger.exception("%s: failed while streaming", self._request_id)
            await writer.write(error_event(ApiError(500, f"internal error in request {self._request_id}"), path))
        await writer.close()


@contextlib.asynccontextmanager
async def interrupted_by_disconnect(receive: Receive, stream: GenerationStream) -> AsyncIterator[None]:
    """While inside, a client that goes away makes ``stream.updates()`` raise ClientDisconnected."""
    watcher = asyncio.create_task(_watch(receive, stream))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(receive: Receive, stream: GenerationStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the body was read before
    stream.interrupt(ClientDisconnected())
