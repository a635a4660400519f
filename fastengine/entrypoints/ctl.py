"""``fastengine ctl``: one control call from a shell. Whatever goes wrong is one line and an exit code."""

from __future__ import annotations

import http.client
import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

REFUSED, USAGE = 1, 2  # exit codes: the server said no or nothing that makes sense; the command line makes none
MAX_QUOTED = 200

# Command -> (method, path, help). Arguments are given as key=value, values read as JSON where they are JSON.
COMMANDS = {
    "pause": ("POST", "/v1/pause", "stop stepping: mode=abort|drain|retract|in_place timeout_s=60"),
    "resume": ("POST", "/v1/resume", "go on after a pause"),
    "is-paused": ("GET", "/v1/is_paused", "whether the engine is paused"),
    "update-weights": ("POST", "/v1/update_weights", "replace the weights: model_path=DIR version=v2 (paused only)"),
    "update-weights-from-tensors": (
        "POST",
        "/v1/update_weights_from_tensors",
        "replace named tensors: path=FILE.safetensors version=v2 (paused only)",
    ),
    "weights-checksum": ("GET", "/v1/weights_checksum", "a checksum of the weights that serve"),
    "sleep": ("POST", "/v1/sleep", 'give memory back: tags=\'["weight","kv_cache"]\''),
    "wakeup": ("POST", "/v1/wakeup", "take the memory again and resume"),
    "abort": ("POST", "/v1/abort_requests", "abort: req_ids='[\"id\"]' or abort_all=true"),
    "flush-cache": ("POST", "/v1/flush_cache", "forget the prefix cache"),
    "profile": ("POST", "/v1/profile", "take a profile: action=start output_dir=DIR, then action=stop"),
    "log-level": ("POST", "/v1/log_level", "set the log level of all processes: level=DEBUG|INFO|WARNING|ERROR"),
    "info": ("GET", "/v1/server_info", "configuration, versions, memory and queues"),
}


class UsageError(Exception):
    """The command line asks for something that can't be sent."""


class CallFailed(Exception):
    """The server's refusal, or why there is no answer of its."""


def control(url: str, command: str, arguments: Sequence[str], key: str | None, timeout_s: float) -> int:
    """Send one control command and print its reply. Returns 0 on success, 1 when the call failed, 2 when it could not be made."""
    try:
        request = _request(url, command, arguments, key)
        if not 0 < timeout_s < math.inf:
            raise UsageError(f"--timeout: {timeout_s} is no number of seconds above 0")
        print(json.dumps(_call(request, url, timeout_s), indent=2))
    except UsageError as error:
        print(f"fastengine ctl: {error}", file=sys.stderr)
        return USAGE
    except CallFailed as error:
        print(f"fastengine ctl: {command}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _request(url: str, command: str, arguments: Sequence[str], key: str | None) -> urllib.request.Request:
    method, path, _ = COMMANDS[command]
    _check_url(url)
    headers = {"Content-Type": "application/json"}
    if key:
        if not key.isascii() or not key.isprintable():
            raise UsageError("--key: a key has printable ASCII characters only")
        headers["Authorization"] = f"Bearer {key}"
    fields: dict[str, Any] = {}
    for argument in arguments:
        name, value = _argument(argument)
        if name in fields:
            raise UsageError(f"{name} is given twice")
        fields[name] = value
    if method == "GET" and fields:
        raise UsageError(f"{command} takes no arguments")
    body = None if method == "GET" else json.dumps(fields).encode()
    return urllib.request.Request(url.rstrip("/") + path, data=body, headers=headers, method=method)


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018 - raises for what is no port
    except ValueError as error:
        raise UsageError(f"--url: {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"--url: {url!r} is not like http://HOST:PORT")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"--url: {url!r} has characters that no address has")


def _call(request: urllib.request.Request, url: str, timeout_s: float) -> Any:
    """The reply's JSON. Raises CallFailed."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            body = _read(reply, url)
    except urllib.error.HTTPError as error:
        raise CallFailed(f"{error.code}: {_refusal(error)}") from None
    except (OSError, OverflowError) as error:
        raise CallFailed(f"{url} does not answer: {_line(str(getattr(error, 'reason', error)) or type(error).__name__)}") from None
    except http.client.HTTPException as error:
        raise CallFailed(f"{url} does not speak HTTP: {_line(repr(error))}") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise CallFailed(f"{url} answered with something that is not JSON: {_line(body.decode(errors='replace'))}") from None


def _read(reply: http.client.HTTPResponse, url: str) -> bytes:
    """The body of a reply that has begun. Raises CallFailed."""
    try:
        return reply.read()
    except TimeoutError:
        raise CallFailed(f"{url} does not go on with its reply") from None
    except (OSError, http.client.IncompleteRead):
        raise CallFailed(f"{url} broke its reply off") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    """The message of an error reply, or the beginning of what came instead of one."""
    try:
        body = error.read()
    except (OSError, http.client.HTTPException):
        return f"{error.reason}, and the rest of the reply is missing"
    try:
        return _line(str(json.loads(body)["error"]["message"]), most=2000)
    except (ValueError, KeyError, TypeError, RecursionError):
        return _line(body.decode(errors="replace")) or str(error.reason)


def _line(text: str, most: int = MAX_QUOTED) -> str:
    """``text`` as one line of printable characters, shortened."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[:most] + "..."


def _argument(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
