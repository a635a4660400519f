"""The outermost layer of every request: keys, the time its body may take, how it ends early, and the count of what was answered."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastengine.entrypoints.responses import error_reply
from fastengine.frontend.errors import ApiError, engine_unavailable
from fastengine.frontend.http_metrics import OTHER, HttpMetrics
from fastengine.frontend.http_protocol import READ_CLOCK, ReadClock
from fastengine.frontend.turnstile import Turnstile

logger = logging.getLogger(__name__)

# Probes of load balancers carry no key.
OPEN_PATHS = frozenset({"/health", "/ping"})
# Methods that change nothing, but on control paths.
READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What counts when nothing was sent.
NOT_ANSWERED = 499
# What uvloop says of a write to a connection that broke a moment ago.
CLOSED = "handler is closed"


class HttpGate:
    """ASGI middleware. ``control_paths`` need one of ``control_keys``, other paths one of ``keys``; no keys, no check.

    ``origins`` are those whose pages may call from a browser.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        control_keys: Sequence[str],
        control_paths: frozenset[str],
        metrics: HttpMetrics,
        origins: Sequence[str] = (),
    ):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._control_keys = [key.encode() for key in control_keys]
        self._control_paths = control_paths
        self._metrics = metrics
        self._origins = frozenset(origin.encode() for origin in origins)
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = NOT_ANSWERED

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and CLOSED not in str(error):
                    raise
                # The receiver of the request is about to be told the same.
                logger.debug("%s: the client went away while it was answered", scope["path"])

        refusal = self._refusal(scope)
        if scope["method"] == "HEAD" and scope["path"] not in self._control_paths:
            # The same as GET but for the body, which the HTTP server leaves out: it goes by its own copy.
            scope = {**scope, "method": "GET"}
        try:
            if scope["path"] not in self._control_paths and scope["path"] not in OPEN_PATHS:
                await self._turnstile.enter()
            if refusal is None:
                await self._app(scope, in_time(scope, receive), counted)
            else:
                await error_reply(refusal, scope["path"])(scope, receive, counted)
        except asyncio.CancelledError:
            # Only the server's own end cancels requests.
            if status == NOT_ANSWERED:
                await error_reply(engine_unavailable("the server is shutting down", retry_after_s=10), scope["path"])(scope, receive, counted)
        finally:
            route = scope.get("route")
            self._metrics.count(OTHER if route is None else route.path, status)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, method = scope["path"], scope["method"]
        is_control = path in self._control_paths
        headers = dict(scope["headers"])
        if (is_control or method not in READING) and self._is_foreign_page(headers) and method != "OPTIONS":
            return ApiError(403, "pages of other sites may not call this server (--cors-origins)", code="cross_site")
        keys = self._control_keys if is_control else self._keys
        if not keys or path in OPEN_PATHS or method == "OPTIONS":
            return None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # Anthropic's header
            if not key:
                return ApiError(401, "an API key is required: send it as 'Authorization: Bearer KEY'")
        # Every key is compared in full, so that the time taken says nothing about any.
        if sum([hmac.compare_digest(key.strip(), known) for known in keys]) == 0:
            return ApiError(401, "this API key is not valid")
        return None

    def _is_foreign_page(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a browser says so: it sends simple requests without asking, and any page can have it send some to this machine."""
        is_foreign = headers.get(b"sec-fetch-site") == b"cross-site"
        return is_foreign and b"*" not in self._origins and headers.get(b"origin") not in self._origins


def in_time(scope: Scope, receive: Receive) -> Receive:
    """``receive``, which raises ApiError 408 when the request's body is not there when its clock has run out."""
    clock: ReadClock | None = scope.get(READ_CLOCK)
    if clock is None or clock.complete:
        return receive

    async def receive_in_time() -> Message:
        if clock.complete:
            return await receive()
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(receive(), clock.deadline - loop.time())
        except asyncio.TimeoutError:
            message = "the request's body did not come in time (--request-read-timeout)"
            raise ApiError(408, message) from None

    return receive_in_time
