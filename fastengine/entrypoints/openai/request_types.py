"""Bodies of the OpenAI endpoints. A field's type is its check and its documentation in ``/docs``.

``null`` means the same as an absent field everywhere. What depends on more than one field, or on the
model, is checked in :mod:`sampling`, :mod:`structured`, :mod:`chat_job` and :mod:`completions`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

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


# What OpenAI's clients may send; templates know few of them. Others go through chat_template_kwargs.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CommonFields(msgspec.Struct, kw_only=True):
    """What every request that runs the model can say, whatever its API."""

    model: Annotated[str | None, Meta(description="A served model's name; 'default' always means the served model.")] = None
    request_id: Annotated[
        Annotated[str, Meta(pattern=r"^[!-~]{1,256}$(?!\n)")] | None, Meta(description="The request's own name; refused with 409 while in use.")
    ] = None
    priority: Annotated[Annotated[int, Meta(ge=-INT32, le=INT32)] | None, Meta(description="Lower runs first.")] = None
    timeout_s: Annotated[Annotated[float, Meta(gt=0, le=1e6)] | None, Meta(description="Seconds after which the request ends with an error.")] = None
    cache_salt: Annotated[Annotated[str, Meta(max_length=256)] | None, Meta(description="KV blocks are shared only among equal salts.")] = None
    user: Annotated[str | None, Meta(description="The caller's name for its end user; has no effect.")] = None
    safety_identifier: Annotated[str | None, Meta(description="As user.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Prefixes are found in the cache without it; has no effect.")] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="The caller's own notes; have no effect.")] = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: Annotated[bool | None, Meta(description="A last chunk without choices holds the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk holds the usage so far.")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="There is none, whatever is asked.")] = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``structures`` and ``triggers`` belong to the type ``structural_tag``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer way to say what guided_* say."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerationFields(CommonFields, kw_only=True):
    """What chat completions and completions have in common."""

    temperature: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="0 means greedy. Default 1.")] = None
    top_p: Annotated[Probability | None, Meta(description="Nucleus sampling; 1 means off, 0 the most likely token alone.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=INT32)] | None, Meta(description="Sample among the k most likely; 0 and -1 mean off.")] = None
    min_p: Annotated[Probability | None, Meta(description="Least probability relative to the most likely token's; 0 means off.")] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="Answers per prompt.")] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="Generate this many and return the n of the highest log-probability per token.")
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None, Meta(description="Makes sampling reproducible whatever else the server does.")
    ] = None
    max_tokens: Annotated[Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="Most tokens to generate.")] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="No end of sequence, stop token or stop string before this many tokens.")
    ] = None
    stop: Annotated[
        Union[StopString, Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)], None],  # noqa: UP007
        Meta(description="Text that ends the answer; not part of it."),
    ] = None
    stop_token_ids: Annotated[Annotated[list[TokenId], Meta(max_length=1024)] | None, Meta(description="Tokens that end the answer.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string in the text.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after an end-of-sequence token.")] = None
    presence_penalty: Annotated[Penalty | None, Meta(description="Taken off the logit of every token the answer has; 0 means off.")] = None
    frequency_penalty: Annotated[Penalty | None, Meta(description="The same, times how often the answer has it.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Divides the logits of the prompt's and the answer's tokens; 1 means off.")
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None, Meta(description="Token id (as a string) -> what is added to its logit.")
    ] = None
    bad_words: Annotated[Annotated[list[StopString], Meta(max_length=1024)] | None, Meta(description="Words that are never generated.")] = None
    bad_words_token_ids: Annotated[
        Annotated[list[Annotated[list[TokenId], Meta(min_length=1)]], Meta(max_length=1024)] | None,
        Meta(description="Sequences of token ids that are never generated, beside `bad_words`."),
    ] = None
    prompt_logprobs: Annotated[TopCount | None, Meta(description="Log-probabilities of the prompt's tokens, with the k most likely beside each.")] = (
        None
    )
    response_format: Annotated[ResponseFormat | None, Meta(description="The shape of the answer: JSON, JSON of a schema, schemas inside tags.")] = (
        None
    )
    guided_json: Annotated[str | dict[str, Any] | bool | None, Meta(description="JSON schema that the answer matches.")] = None
    guided_json_object: Annotated[bool | None, Meta(description="The answer is a JSON object.")] = None
    guided_regex: Annotated[str | None, Meta(description="Regular expression that the answer matches.")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="Texts of which the answer is one.")] = None
    guided_grammar: Annotated[str | None, Meta(description="Grammar that the answer matches, in Lark's or GBNF's notation.")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="Structures (begin, schema, end) and triggers: free text with schemas inside tags.")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="One of json, json_object, regex, choice, grammar, structural_tag.")] = (
        None
    )
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out of the text. Default true.")] = None
    prompt_token_ids: Annotated[
        list[Union[TokenId, list[TokenId]]] | None,  # noqa: UP007
        Meta(description="Token ids that stand in for messages or prompt."),
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Return the prompt's and the answer's token ids.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="With stream: include_usage, continuous_usage_stats.")] = None
    max_streaming_response_tokens: Annotated[
        Count | None,
        Meta(
            description="Tokens gathered per streamed chunk, at least. Default 1; a chunk holds more where they come together "
            "(`--decode-run-ms`) or its reader is slow."
        ),
    ] = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str  # which there are depends on where it stands: checked there
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64, description="Whatever the chat template knows.")]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # Of older and other models: there is nothing to do with them, and they must not get lost without a word.
    function_call: None = None
    audio: None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage] | None, Meta(description="The chat so far, for the chat template.")] = None
    max_completion_tokens: Annotated[Count | None, Meta(description="OpenAI's newer name of max_tokens; wins over it.")] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probability of every token.")] = None
    top_logprobs: Annotated[TopCount | None, Meta(description="With logprobs: the k most likely tokens beside each.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="End the prompt where the assistant's answer begins. Default true.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="The answer continues the last message.")] = None
    echo: Annotated[bool | None, Meta(description="With continue_final_message: repeat that message before the answer.")] = None
    chat_template: Annotated[str | None, Meta(description="A Jinja template used instead of the model's own.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables for the chat template.")] = None
    enable_thinking: Annotated[bool | None, Meta(description="The chat template's variable of that name.")] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Meta(description="The chat template's variable of that name, from none to max; 'none' also means enable_thinking false."),
    ] = None
    reasoning_max_tokens: Annotated[Count | None, Meta(description="Most tokens of reasoning; past it the model goes on with its answer.")] = None
    include_reasoning: Annotated[bool | None, Meta(description="Return the reasoning. Default true.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="none, auto, required, or a function that must be called. Default auto with tools.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Whether there may be several calls in one answer. Default true.")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[Union[str, TokenId, list[TokenId]]] | None,  # noqa: UP007
        Meta(description="Text, token ids, or a list of either."),
    ] = None
    logprobs: Annotated[TopCount | None, Meta(description="Return log-probabilities, with the k most likely tokens beside each.")] = None
    echo: Annotated[bool | None, Meta(description="Repeat the prompt before the answer.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin a text prompt with the tokenizer's special tokens. Default true.")] = None
