"""Fields other servers know and this one does not act on: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

from fastengine.frontend.errors import bad_request

# Field -> the values that ask for nothing, next to null.
REFUSED_BY_ALL: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "logits_processors_args": ({},),
    "use_beam_search": (False,),
}
REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = {
    **REFUSED_BY_ALL,
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
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
