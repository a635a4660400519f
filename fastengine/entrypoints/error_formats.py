"""Errors in the shape the path's API promises: OpenAI's everywhere but under Anthropic's paths."""

from __future__ import annotations

from typing import Any

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


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    if not is_anthropic(path):
        return error.body()
    kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_event(error: ApiError, path: str) -> bytes:
    """What ends a stream that has begun."""
    data = event_json(error_body(error, path))
    return b"event: error\ndata: " + data + b"\n\n" if is_anthropic(path) else b"data: " + data + b"\n\n" + DONE_EVENT
