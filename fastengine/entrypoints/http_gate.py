"""The outermost layer of every request: keys, and the count of what was answered."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastengine.entrypoints.responses import error_reply
from fastengine.frontend.errors import ApiError
from fastengine.frontend.http_metrics import OTHER, HttpMetrics

# Probes of load balancers carry no key.
OPEN_PATHS = frozenset({"/health", "/ping"})
MAX_HEADER_BYTES = 64 * 1024


class HttpGate:
    """ASGI middleware. ``control_paths`` need one of ``control_keys``, other paths one of ``keys``; no keys, no check."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], control_keys: Sequence[str], control_paths: frozenset[str], metrics: HttpMetrics):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._control_keys = [key.encode() for key in control_keys]
        self._control_paths = control_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # what counts when nothing was sent

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._refusal(scope)
        try:
            if refusal is None:
                await self._app(scope, receive, counted)
            else:
                await error_reply(refusal)(scope, receive, counted)
        finally:
            route = scope.get("route")
            self._metrics.count(OTHER if route is None else route.path, status)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return ApiError(431, f"the request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB")
        path = scope["path"]
        keys = self._control_keys if path in self._control_paths else self._keys
        if not keys or path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        if kind.lower() != b"bearer":
            return ApiError(401, "an API key is required: send it as 'Authorization: Bearer KEY'")
        # Every key is compared in full, so that the time taken says nothing about any.
        if sum([hmac.compare_digest(key.strip(), known) for known in keys]) == 0:
            return ApiError(401, "this API key is not valid")
        return None
