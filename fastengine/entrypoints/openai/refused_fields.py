"""Fields other servers know and this one does not act on: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

from fastengine.frontend.errors import bad_request

# Field -> the values that ask for nothing, next to null.
REFUSED_BY_ALL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "logits_processors_args": ({},),
    "response_format": ({"type": "text"},),
    "structural_tag": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = {
    **REFUSED_BY_ALL,
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    # Without tools there is no call to make, in parallel or otherwise.
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_max_tokens": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
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
