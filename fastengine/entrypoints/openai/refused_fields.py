"""Fields other servers know and this one does not act on: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

from fastengine.frontend.errors import bad_request

# Field -> the values that ask for nothing, next to null.
REFUSED_BY_ALL: dict[str, tuple[Any, ...]] = {
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
REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = {
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
}
REFUSED_BY_COMPLETIONS: dict[str, tuple[Any, ...]] = {**REFUSED_BY_ALL, "suffix": ("",)}


def refuse_unsupported(body: dict[str, Any], refused: dict[str, tuple[Any, ...]]) -> None:
    """Raise ApiError 400 for a field of ``refused`` that asks for something."""
    for name in body.keys() & refused.keys():
        value = body[name]
        # Compared with their types: True is not 1 here.
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in refused[name]):
            raise bad_request(name, "this field is not supported", code="unsupported_field")
