"""A chat's messages: what every template can rely on is checked, the rest is the template's to know.

Roles are the template's to know: what it has no place for is refused by :class:`ChatTemplate`. What OpenAI asks of the roles that everybody has is asked here, too: a tool's message says which
call it answers, and the assistant's says something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastengine.entrypoints.openai.request_types import ChatMessage
from fastengine.frontend.errors import bad_request


def joined_text(message: ChatMessage, position: int) -> str:
    """The message's text parts as one string. Raises ApiError 400 for a part of another kind."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        param = f"messages[{position}].content[{i}]"
        if part.type not in ("text", "input_text", "output_text"):
            raise bad_request(f"{param}.type", f"{part.type!r} content is not supported by this model, only text is", code="unsupported_content")
        if part.text is None:
            raise bad_request(f"{param}.text", "this field is required")
        texts.append(part.text)
    return "".join(texts)


def template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    """The message as chat templates know it. Raises ApiError 400 naming its field."""
    where = f"messages[{position}]"
    content = None if message.content is None else joined_text(message, position)
    if message.role != "assistant":
        if content is None:
            raise bad_request(f"{where}.content", "this field is required")
        if message.role == "tool" and message.tool_call_id is None:
            raise bad_request(f"{where}.tool_call_id", "this field is required: it says which call the tool's message answers")
    elif content is None:
        content = message.refusal
        if content is None and not message.tool_calls and message.reasoning_content is None:
            raise bad_request(f"{where}.content", "this field is required in a message of the assistant's without tool_calls")
    for i, call in enumerate(message.tool_calls or ()):
        _check_call(call, f"{where}.tool_calls[{i}]")
    out: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    return out


def _check_call(call: Mapping[str, Any], where: str) -> None:
    """A call as the assistant made it; what its arguments are is looked at when they are shown to the template."""
    if call.get("type", "function") != "function":
        raise bad_request(f"{where}.type", "only calls of the type 'function' are supported")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"{where}.function", "this field is required, an object with a name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where}.function.name", "this field is required, a string")
    if not isinstance(arguments, str | Mapping | None):
        raise bad_request(f"{where}.function.arguments", "expected a string of JSON, or an object")
    if not isinstance(call.get("id"), str | None):
        raise bad_request(f"{where}.id", "expected a string")
