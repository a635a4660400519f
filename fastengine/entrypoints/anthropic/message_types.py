"""Bodies and replies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastengine.entrypoints.openai.request_types import INT32, MAX_STOP_STRINGS, CommonFields, Count, Probability, StopString


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Accepted and without effect: every prefix is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class PlainText(msgspec.Struct, kw_only=True):
    """A text block where no other kind may stand."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[PlainText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """A tool of the client's own; Anthropic's server tools have other types."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """``name`` belongs to the type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """``budget_tokens``, at least 1024 and less than ``max_tokens``, belongs to the type ``enabled``. Without the field the chat template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class CountTokensBody(CommonFields, kw_only=True):
    """POST /v1/messages/count_tokens: the part of a message's body that its length depends on; what says how it runs has no effect."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[PlainText] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: Probability | None = None


class Usage(msgspec.Struct, kw_only=True):
    """The prompt's tokens are ``input_tokens`` (computed) and ``cache_read_input_tokens`` (found in the prefix cache)."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class ReplyTextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ReplyThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ReplyToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = ReplyTextBlock | ReplyThinkingBlock | ReplyToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage


class CountTokensReply(msgspec.Struct, kw_only=True):
    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's error object."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET
