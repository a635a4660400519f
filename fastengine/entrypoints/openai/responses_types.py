"""Bodies and replies of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastengine.entrypoints.openai.request_types import (
    INT32,
    INT64,
    MAX_STOP_STRINGS,
    CommonFields,
    Count,
    Probability,
    ReasoningEffort,
    StopString,
    TopCount,
)
from fastengine.entrypoints.openai.response_types import TokenLogprob

ResponseId = Annotated[str, Meta(pattern=r"^resp_[0-9a-f]{32}$(?!\n)")]
Item = dict[str, Any]


class TextFormat(msgspec.Struct, kw_only=True):
    """``name`` and ``schema`` belong to the type ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | bool | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """``effort`` is the chat template's ``reasoning_effort``; there are no summaries."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    max_tokens: Annotated[Count | None, Meta(description="Most tokens of reasoning.")] = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: Annotated[bool | None, Meta(description="There is none, whatever is asked.")] = None


class ResponsesBody(CommonFields, kw_only=True):
    """POST /v1/responses"""

    input: Annotated[
        str | Annotated[list[Item], Meta(min_length=1)],
        Meta(description="A user's message, or items: messages, function calls and their outputs, reasoning."),
    ]
    instructions: Annotated[str | None, Meta(description="System prompt; not carried over to later responses.")] = None
    previous_response_id: Annotated[ResponseId | None, Meta(description="A stored response whose conversation this one continues.")] = None
    background: Annotated[bool | None, Meta(description="Reply at once; the response is fetched later.")] = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    max_output_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    store: Annotated[bool | None, Meta(description="Keep the response for later requests. Default true.")] = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: TopCount | None = None
    top_p: Probability | None = None
    truncation: Annotated[Literal["disabled"] | None, Meta(description="A conversation that is too long is refused.")] = None
    # What OpenAI does not have.
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Union[StopString, Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)], None] = None  # noqa: UP007
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """``reasoning_tokens``: the tokens that the reasoning's text has."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. The fields of the request are repeated in it, with the defaults that were used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None  # of the status completed
    status: ResponseStatus
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, Any] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningConfig
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float = 1.0
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
