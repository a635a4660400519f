"""From a Messages body to the chat it means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastengine.entrypoints.anthropic.message_types import (
    Block,
    CountTokensBody,
    Message,
    MessagesBody,
    PlainText,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from fastengine.entrypoints.openai.generation import common_fields
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, ChatMessage
from fastengine.entrypoints.renamed_fields import by_root
from fastengine.frontend.errors import bad_request

_ROOTS = by_root(
    {
        "continue_final_message": "messages",
        "parallel_tool_calls": "tool_choice",
        "reasoning_max_tokens": "thinking.budget_tokens",
        "stop": "stop_sequences",
    }
)
MIN_THINKING_TOKENS = 1024
# The system prompt and tool results are messages of their own in a chat: positions differ.
_IN_MESSAGES = re.compile(r"messages\[\d+\].*")


def rename(param: str) -> str:
    """A field of the chat as the Messages API calls it."""
    param = _IN_MESSAGES.sub("messages", param)
    return _ROOTS(param.replace(".function.parameters", ".input_schema").replace(".function", ""))


def chat_request(body: CountTokensBody) -> ChatCompletionRequest:
    """The chat of ``body``. Raises ApiError 400 naming a field of ``body``."""
    thinking = body.thinking
    if thinking is not None:
        _check_thinking(thinking, body.max_tokens if isinstance(body, MessagesBody) else None)
    # A last message of the assistant's is the beginning of the answer.
    prefilled = bool(body.messages) and body.messages[-1].role == "assistant"
    chat = ChatCompletionRequest(
        **common_fields(body),
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        continue_final_message=prefilled,
        enable_thinking=None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled",
        reasoning_max_tokens=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
    )
    if body.tool_choice is not None:
        chat.tool_choice = _tool_choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.stream = body.stream
        chat.temperature, chat.top_p, chat.top_k, chat.min_p = body.temperature, body.top_p, body.top_k, body.min_p
    return chat


def _messages(body: CountTokensBody) -> list[ChatMessage]:
    if not body.messages:
        raise bad_request("messages", "at least one message is required")
    messages = []
    if body.system:
        messages.append(ChatMessage(role="system", content=_text(body.system)))
    _check_results(body.messages)
    for i, message in enumerate(body.messages):
        messages += _user(message, i) if message.role == "user" else [_assistant(message, i)]
    return messages


def _check_results(messages: Sequence[Message]) -> None:
    """Raise ApiError 400 for a tool_result without its tool_use in the assistant's turn before, and for the reverse."""
    waiting: dict[str, str] = {}  # id -> path of each tool_use without its result
    for i, message in enumerate(messages):
        if message.role == "assistant" and i and messages[i - 1].role == "user":
            _check_none_waits(waiting)
        if isinstance(message.content, str):
            continue
        for j, block in enumerate(message.content):
            where = f"messages[{i}].content[{j}]"
            if isinstance(block, ToolUseBlock) and message.role == "assistant":
                if block.id in waiting:
                    raise bad_request(f"{where}.id", f"another tool_use of this message has the id {block.id[:64]!r}")
                waiting[block.id] = where
            elif isinstance(block, ToolResultBlock) and message.role == "user" and waiting.pop(block.tool_use_id, None) is None:
                raise bad_request(f"{where}.tool_use_id", f"there is no tool_use {block.tool_use_id[:64]!r} in the message before")
    _check_none_waits(waiting)


def _check_none_waits(waiting: Mapping[str, str]) -> None:
    for where in waiting.values():
        raise bad_request(where, "a tool_use must be followed by its tool_result, in the message after")


def _check_thinking(thinking: Thinking, max_tokens: int | None) -> None:
    param, budget = "thinking.budget_tokens", thinking.budget_tokens
    if thinking.type != "enabled":
        if budget is not None:
            raise bad_request(param, "belongs to the type enabled")
    elif budget is None:
        raise bad_request(param, "this field is required with the type enabled")
    elif budget < MIN_THINKING_TOKENS:
        raise bad_request(param, f"expected int >= {MIN_THINKING_TOKENS}")
    elif max_tokens is not None and budget >= max_tokens:
        raise bad_request(param, f"{budget} must be less than max_tokens ({max_tokens})")


def _text(content: str | Sequence[PlainText]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _user(message: Message, position: int) -> list[ChatMessage]:
    """Each tool result is a message of its own, before the user's words."""
    if isinstance(message.content, str):
        return [ChatMessage(role="user", content=message.content)]
    results, texts = [], []
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            results.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content or "")))
        else:
            raise _misplaced(block, position, i, "user")
    return [*results, ChatMessage(role="user", content="\n".join(texts))] if texts or not results else results


def _assistant(message: Message, position: int) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage(role="assistant", content=message.content)
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced(block, position, i, "assistant")
    content = "\n".join(texts) if texts or not calls else None
    return ChatMessage(role="assistant", content=content, reasoning_content="".join(thoughts) or None, tool_calls=calls or None)


def _misplaced(block: Block, position: int, index: int, role: str) -> Exception:
    param = f"messages[{position}].content[{index}].type"
    if isinstance(block, RedactedThinkingBlock):
        return bad_request(param, "redacted thinking can't be read here: leave it out")
    return bad_request(param, f"a block of this type can't be part of a message of the {role}'s")


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.name", "this field is required with the type tool")
    return {"type": "function", "function": {"name": choice.name}}
