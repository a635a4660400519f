"""What can go wrong with a request, with the HTTP status each becomes."""

from __future__ import annotations

from typing import Any

from fastengine.protocol.outputs import EngineError

# Status -> (OpenAI's error type, default error code).
ERROR_KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("conflict_error", None),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("client_disconnected", None),
    500: ("server_error", "internal_error"),
    503: ("server_error", "engine_unavailable"),
    504: ("server_error", "timeout"),
}


class ApiError(Exception):
    """A refusal or failure that a client is told about.

    ``param`` names the caller's own field; the message then starts with that name. ``code`` is the
    machine-readable reason; ``retry_after_s`` becomes a ``Retry-After`` header (whole seconds, rounded up).
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @classmethod
    def from_engine(cls, error: EngineError) -> ApiError:
        retry = error.retry_after_s
        if retry is None and error.code in (429, 503):
            retry = 1.0
        return cls(error.code, error.message, param=error.param, code=error.reason, retry_after_s=retry)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind, code = ERROR_KINDS.get(self.status, ("server_error" if self.status >= 500 else "invalid_request_error", None))
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}}


class ClientDisconnected(Exception):
    """The client closed its connection: there is nobody to answer."""


def bad_request(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 whose message starts with the field's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def engine_unavailable(message: str, *, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, message, retry_after_s=retry_after_s)
