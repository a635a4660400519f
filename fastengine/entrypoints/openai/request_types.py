"""Bodies of the OpenAI endpoints. A field's type is its check and its documentation in ``/docs``.

``null`` means the same as an absent field everywhere. What depends on more than one field, or on the
model, is checked in :mod:`sampling`, :mod:`chat` and :mod:`completions`.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec
from msgspec import Meta

INT32 = 2**31 - 1
INT64 = 2**63 - 1

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=INT32)]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
TopCount = Annotated[int, Meta(ge=0, le=20)]
MAX_STOP_STRINGS = 16
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: Annotated[bool | None, Meta(description="A last chunk without choices holds the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk holds the usage so far.")] = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat completions and completions have in common."""

    model: Annotated[str | None, Meta(description="A served model's name; 'default' always means the served model.")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="0 means greedy. Default 1.")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="Nucleus sampling; 1 means off.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=INT32)] | None, Meta(description="Sample among the k most likely; 0 and -1 mean off.")] = None
    min_p: Annotated[Probability | None, Meta(description="Least probability relative to the most likely token's; 0 means off.")] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="Answers per prompt.")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None, Meta(description="Makes sampling reproducible whatever else the server does.")
    ] = None
    max_tokens: Annotated[Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="Most tokens to generate.")] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="No end of sequence or stop token before this many tokens.")
    ] = None
    stop: Annotated[
        Union[StopString, Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)], None],  # noqa: UP007
        Meta(description="Text that ends the answer; not part of it."),
    ] = None
    stop_token_ids: Annotated[Annotated[list[TokenId], Meta(max_length=1024)] | None, Meta(description="Tokens that end the answer.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string in the text.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after an end-of-sequence token.")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="1 means off.")] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None, Meta(description="Token id (as a string) -> what is added to its logit.")
    ] = None
    bad_words: Annotated[Annotated[list[StopString], Meta(max_length=1024)] | None, Meta(description="Words that are never generated.")] = None
    prompt_logprobs: Annotated[TopCount | None, Meta(description="Log-probabilities of the prompt's tokens, with the k most likely beside each.")] = (
        None
    )
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out of the text. Default true.")] = None
    prompt_token_ids: Annotated[
        list[Union[TokenId, list[TokenId]]] | None,  # noqa: UP007
        Meta(description="Token ids that stand in for messages or prompt."),
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Return the prompt's and the answer's token ids.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: StreamOptions | None = None
    max_streaming_response_tokens: Annotated[Count | None, Meta(description="Tokens gathered per streamed chunk. Default 1.")] = None
    request_id: Annotated[
        Annotated[str, Meta(pattern=r"^[!-~]{1,256}$")] | None, Meta(description="The request's own name; refused with 409 while in use.")
    ] = None
    priority: Annotated[Annotated[int, Meta(ge=-INT32, le=INT32)] | None, Meta(description="Lower runs first.")] = None
    timeout_s: Annotated[Annotated[float, Meta(gt=0, le=1e6)] | None, Meta(description="Seconds after which the request ends with an error.")] = None
    cache_salt: Annotated[Annotated[str, Meta(max_length=256)] | None, Meta(description="KV blocks are shared only among equal salts.")] = None
    user: Annotated[str | None, Meta(description="The caller's name for its end user; has no effect.")] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="The caller's own notes; have no effect.")] = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: Annotated[Count | None, Meta(description="OpenAI's newer name of max_tokens; wins over it.")] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probability of every token.")] = None
    top_logprobs: Annotated[TopCount | None, Meta(description="With logprobs: the k most likely tokens beside each.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="End the prompt where the assistant's answer begins. Default true.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="The answer continues the last message.")] = None
    echo: Annotated[bool | None, Meta(description="With continue_final_message: repeat that message before the answer.")] = None
    chat_template: Annotated[str | None, Meta(description="A Jinja template used instead of the model's own.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the chat template.")] = None
    enable_thinking: Annotated[bool | None, Meta(description="The chat template's variable of that name.")] = None
    reasoning_effort: Annotated[str | None, Meta(description="The chat template's variable of that name.")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[Union[str, TokenId, list[TokenId]]] | None,  # noqa: UP007
        Meta(description="Text, token ids, or a list of either."),
    ] = None
    logprobs: Annotated[TopCount | None, Meta(description="Return log-probabilities, with the k most likely tokens beside each.")] = None
    echo: Annotated[bool | None, Meta(description="Repeat the prompt before the answer.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin a text prompt with the tokenizer's special tokens. Default true.")] = None
