"""From the items of a response's input and output to the messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fastengine.entrypoints.openai.generation import common_fields
from fastengine.entrypoints.openai.request_types import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
)
from fastengine.entrypoints.openai.responses_types import FunctionCallItem, Item, MessageItem, OutputItem, ResponsesBody, TextFormat
from fastengine.entrypoints.renamed_fields import by_root
from fastengine.entrypoints.request_body import validation_error
from fastengine.frontend.errors import ApiError, bad_request

_ROOTS = by_root(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "include",
        "response_format": "text.format",
        "reasoning_max_tokens": "reasoning.max_tokens",
    }
)


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class InputCall(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str


class InputCallOutput(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | list[ContentPart]


class InputReasoning(msgspec.Struct, kw_only=True):
    content: list[ContentPart] | None = None


KINDS: dict[str, type[InputMessage | InputCall | InputCallOutput | InputReasoning]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}


def rename(param: str) -> str:
    """A field of the chat as the Responses API calls it; positions of messages are not those of items."""
    if param.startswith("messages["):
        return "input"
    return _ROOTS(param.replace(".json_schema", "").replace(".function", ""))


def input_items(given: str | Sequence[Item]) -> list[Item]:
    """The body's input as a list of items, each with an id."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [{**item, "id": item.get("id") or f"item_{uuid.uuid4().hex}", "type": item.get("type") or "message"} for item in given]


def input_messages(items: Sequence[Item]) -> list[ChatMessage]:
    """The chat's messages. Raises ApiError 400 naming the item."""
    messages: list[ChatMessage] = []
    for i, item in enumerate(items):
        kind = KINDS.get(item["type"]) if isinstance(item["type"], str) else None
        if kind is None:
            raise bad_request(f"input[{i}].type", f"items of the type {item['type']!r:.64} are not supported; there are {', '.join(KINDS)}")
        try:
            _add(messages, msgspec.convert(item, kind), f"input[{i}]")
        except msgspec.ValidationError as error:
            raise _placed(validation_error(error), f"input[{i}]") from None
    return messages


def _placed(error: ApiError, where: str) -> ApiError:
    param = f"{where}.{error.param}" if error.param else where
    message = error.message.removeprefix(f"{error.param}: ") if error.param else error.message
    return bad_request(param, message)


def _add(messages: list[ChatMessage], item: InputMessage | InputCall | InputCallOutput | InputReasoning, where: str) -> None:
    if isinstance(item, InputMessage):
        # Few templates know developers; what they say is the system's word.
        role = "system" if item.role == "developer" else item.role
        content = _text(item.content, f"{where}.content")
        last = messages[-1] if messages else None
        if role == "assistant" and last is not None and last.role == "assistant" and last.content is None and not last.tool_calls:
            last.content = content  # the answer that its reasoning led to
        else:
            messages.append(ChatMessage(role=role, content=content))
    elif isinstance(item, InputCallOutput):
        messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output, f"{where}.output")))
    elif isinstance(item, InputReasoning):
        messages.append(ChatMessage(role="assistant", reasoning_content=_text(item.content or [], f"{where}.content")))
    else:
        check_arguments(item.arguments, f"{where}.arguments")
        if not messages or messages[-1].role != "assistant":
            messages.append(ChatMessage(role="assistant"))
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]


def check_arguments(arguments: str, where: str) -> None:
    """Raise ApiError 400 for a call's arguments that no template could be shown."""
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise bad_request(where, f"not JSON ({error})") from None


def _text(content: str | Sequence[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "reasoning_text"):
            raise bad_request(
                f"{where}[{i}].type", f"{part.type!r:.64} content is not supported by this model, only text is", code="unsupported_content"
            )
        if part.text is None:
            raise bad_request(f"{where}[{i}].text", "this field is required")
    return "".join(part.text or "" for part in content)


def output_messages(items: Sequence[OutputItem]) -> list[ChatMessage]:
    """What a response said, as the messages of the chat that goes on after it (reasoning and calls that are none are not repeated to the model)."""
    message = ChatMessage(role="assistant")
    for item in items:
        if isinstance(item, MessageItem):
            message.content = (message.content or "") + "".join(part.text for part in item.content)  # type: ignore[operator]
        elif isinstance(item, FunctionCallItem) and item.status == "completed":
            call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            message.tool_calls = [*(message.tool_calls or []), call]
    return [message] if message.content is not None or message.tool_calls else []


def chat_request(body: ResponsesBody, messages: Sequence[ChatMessage]) -> ChatCompletionRequest:
    """The chat of ``body`` after ``messages``, the instructions put before them."""
    if body.instructions:
        messages = [ChatMessage(role="system", content=body.instructions), *messages]
    reasoning = body.reasoning
    with_logprobs = bool(body.include) or bool(body.top_logprobs)
    return ChatCompletionRequest(
        **common_fields(body),
        messages=list(messages),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=body.stop,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs if with_logprobs else None,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format) if body.text is not None and body.text.format is not None else None,
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        reasoning_max_tokens=reasoning.max_tokens if reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        enable_thinking=body.enable_thinking,
        stream=body.stream,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Chat templates know the nested form; what is no function is refused where tools are checked."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema if given.schema is not msgspec.UNSET else None))
