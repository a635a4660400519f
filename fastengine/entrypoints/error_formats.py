"""Errors in the shape the path's API promises: Anthropic's under its paths, the control API's on its routes, OpenAI's elsewhere."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from fastengine.entrypoints import control_types
from fastengine.entrypoints.event_json import event_json
from fastengine.frontend.errors import ApiError

ANTHROPIC_ROOT = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
DONE_EVENT = b"data: [DONE]\n\n"


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_ROOT or path.startswith(ANTHROPIC_ROOT + "/")


def error_body(error: ApiError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """``request_id`` is the control API's; None: the request had none yet."""
    if path in control_types.PATHS or path in control_types.SGLANG_PATHS:
        return _control_body(error, path, request_id or f"ctl-{uuid.uuid4().hex}")
    if not is_anthropic(path):
        return error.body()
    kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _control_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    detail = control_types.ControlError(code=error.status, message=error.message, param=error.param)
    reply = control_types.ControlReply(request_id=request_id, status="error", error=detail)
    if path in control_types.SGLANG_PATHS:
        reply = control_types.SglangReply(request_id=request_id, status="error", error=detail, success=False, message=error.message)
    body: dict[str, Any] = msgspec.to_builtins(reply)
    return body


def error_event(error: ApiError, path: str) -> bytes:
    """What ends a stream that has begun."""
    data = event_json(error_body(error, path))
    return b"event: error\ndata: " + data + b"\n\n" if is_anthropic(path) else b"data: " + data + b"\n\n" + DONE_EVENT
