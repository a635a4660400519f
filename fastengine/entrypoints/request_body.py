"""From the bytes of a request to a checked struct: every way a body can be bad is a 400 that says where."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from fastengine.entrypoints.json_values import unusable_value
from fastengine.entrypoints.unknown_fields import nested_unknown_fields
from fastengine.frontend.errors import ApiError, ClientDisconnected, bad_request

T = TypeVar("T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$", re.DOTALL)
# A header can't hold whatever a client names its fields.
_PRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
MAX_FIELDS_NAMED = 20
EXACT_FLOAT = 2**53
# So much past the limit is still read before it is refused: closing on what a client is sending may cost it the reply.
MAX_READ_OVER = 1 << 20
MAX_NAME_LENGTH = 64
MAX_PATH_LENGTH = 256


@dataclass
class Parsed(Generic[T]):
    """A body as its struct, with the names of the fields nobody knows."""

    value: T
    unknown: list[str] = field(default_factory=list)

    def warning_headers(self) -> dict[str, str]:
        if not self.unknown:
            return {}
        return {"X-Fastengine-Warning": f"unknown fields ignored: {', '.join(printable(name) for name in self.unknown[:MAX_FIELDS_NAMED])}"}


def printable(name: str) -> str:
    return _PRINTABLE.sub("?", name[:MAX_NAME_LENGTH])


def printable_path(path: str) -> str | None:
    """``path`` with what a reply can hold of a caller's own names; None for that of the body itself."""
    return _PRINTABLE.sub("?", path[:MAX_PATH_LENGTH]) or None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError: 413 as soon as it is known to be longer than ``max_bytes``, 415 if it is compressed."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"Content-Encoding: {printable(coding)} is not understood, send the body uncompressed"
        raise ApiError(415, message, code="unsupported_content_encoding")
    length = request.headers.get("content-length", "")
    excess = int(length) - max_bytes if length.isdecimal() else 0
    if excess > MAX_READ_OVER or (excess > 0 and "expect" in request.headers):
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes + (MAX_READ_OVER if excess > 0 else 0):
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientDisconnected from None
    if excess > 0:
        raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes / 2**20:g} MiB")


def decode_object(body: bytes, *, empty_is: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object. ``empty_is`` stands for an empty body where that is allowed."""
    if not body.strip():
        if empty_is is not None:
            return empty_is
        raise bad_request(None, "the request body is empty: send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request(None, "the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        named = unusable_value(body)
        if named is not None:
            raise bad_request(printable_path(named[0]), named[1]) from None
        raise bad_request(None, f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(None, f"the request body must be a JSON object, not {_json_type(value)}")
    return value


def convert(value: dict[str, Any], kind: type[T]) -> T:
    """``value`` as ``kind``. Raises ApiError 400 with the field's path as ``param``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise validation_error(error) from None
    try:
        # JSON has but one kind of number, and some clients write 3 as 3.0.
        return msgspec.convert(_with_integers(value), kind)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None


def _with_integers(value: Any) -> Any:
    """``value`` with its integral floats (those that a float holds exactly) as integers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= EXACT_FLOAT else value
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def validation_error(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    place = _PLACE.search(text)
    param = place.group(1).replace("[...]", "") if place else None
    reason = (text[: place.start()] if place else text).replace("`", "")
    missing = re.match(r"Object missing required field (\w+)", reason)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        reason = "this field is required"
    unknown = re.match(r"Object contains unknown field (.*)", reason, re.DOTALL)
    if unknown:
        name = printable(unknown.group(1))
        param = f"{param}.{name}" if param else name
        reason = "there is no such field"
    return bad_request(param, reason[0].lower() + reason[1:])


def parse(value: dict[str, Any], kind: type[T], *, known_elsewhere: Iterable[str] = (), strict: bool) -> Parsed[T]:
    """``value`` as ``kind``, with its unknown fields listed, or refused with 400 if ``strict``."""
    unknown = [name for name in value if name not in kind.__struct_fields__ and name not in known_elsewhere]
    parsed = Parsed(convert(value, kind), unknown)
    unknown += itertools.islice(nested_unknown_fields(value, kind), MAX_FIELDS_NAMED)
    if strict:
        refuse_unknown(unknown)
    return parsed


def refuse_unknown(unknown: Sequence[str]) -> None:
    if unknown:
        raise bad_request(unknown[0], "there is no such field")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")
