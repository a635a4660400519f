"""Fields other servers know and this one does not act on: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CompletionRequest
from fastengine.frontend.errors import bad_request

Refused = dict[str, tuple[Any, ...]]

# Field -> the values that ask for nothing, next to null.
REFUSED_BY_ALL: Refused = {
    "allowed_token_ids": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_draft_logprobs": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logits_processors_args": ({},),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
# What asks for nothing in fields that chat completions or completions act on, where another endpoint doesn't.
NEUTRAL: Refused = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "bad_words_token_ids": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "guided_json_object": (False,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "max_streaming_response_tokens": (1,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "stream": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}


def refused_by(body: type[msgspec.Struct], own: Refused) -> Refused:
    """``own``, and whatever chat completions or completions act on while ``body`` has no such field."""
    elsewhere = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - {*body.__struct_fields__}
    return {name: NEUTRAL.get(name, ()) for name in sorted(elsewhere)} | own


REFUSED_BY_CHAT = refused_by(
    ChatCompletionRequest,
    {
        **REFUSED_BY_ALL,
        "add_special_tokens": (False,),
        "audio": (),
        "disable_chat_template": (False,),
        "documents": ([],),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "response_max_tokens": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
)
REFUSED_BY_COMPLETIONS = refused_by(CompletionRequest, {**REFUSED_BY_ALL, "suffix": ("",)})


def refuse_unsupported(body: dict[str, Any], refused: Refused) -> None:
    """Raise ApiError 400 for a field of ``refused`` that asks for something."""
    for name in body.keys() & refused.keys():
        value = body[name]
        # Compared with their types: True is not 1 here.
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in refused[name]):
            raise bad_request(name, "this field is not supported", code="unsupported_field")
