"""A field whose values are a few words takes no other: every text in every request is an enumeration, or named here as free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from fastengine.entrypoints import control_routes, request_body, tokenize_routes
from fastengine.entrypoints.anthropic.message_types import CountTokensBody, MessagesBody
from fastengine.entrypoints.openai.embeddings_types import EmbeddingsBody
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CompletionRequest
from fastengine.entrypoints.openai.responses_input import KINDS
from fastengine.entrypoints.openai.responses_types import ResponsesBody
from fastengine.entrypoints.score_types import RerankBody, ScoreBody
from fastengine.entrypoints.sglang.generate_types import GenerateBody
from fastengine.frontend.errors import ApiError
from tests.entrypoints.bodies import HI

BODIES: list[type[msgspec.Struct]] = [
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    GenerateBody,
    EmbeddingsBody,
    ScoreBody,
    RerankBody,
    tokenize_routes.TokenizeBody,
    tokenize_routes.DetokenizeBody,
    *dict.fromkeys(KINDS.values()),
    *dict.fromkeys(route.body for route in control_routes.ROUTES),
]
# Texts of the caller's own: what is in them is not ours to say.
FREE = """model user safety_identifier prompt_cache_key cache_salt extra_key request_id rid previous_response_id id name call_id tool_call_id tool_use_id
content text thinking signature data description arguments output reasoning_content refusal title query documents queries text_1 text_2 input prompt
instructions system stop stop_sequences bad_words triggers model_path version weight_version verify_checksum path output_dir req_ids"""
# Texts in a language of their own, compiled before anything is run.
COMPILED = "guided_json guided_regex guided_choice guided_grammar structural_tag json regex choice grammar json_schema ebnf chat_template"
# What counts depends on the model or on where it stands; each is refused in a test of its own.
CHECKED_ELSEWHERE = {
    "role",  # of a chat's message: the template knows
    "type",  # of a content part, see messages[0].content[0].type in test_bad_requests.py
    "tool_choice",  # beside an object that names a function
    "tags",  # of memory, in test_control_routes.py
}


@dataclass(frozen=True)
class Step:
    """One step on the way to a field: an index (any stands for all), or a name, with the tag that such an object has."""

    name: str | int
    tag: tuple[tuple[str, Any], ...] = ()

    def around(self, value: Any) -> Any:
        return [value] if isinstance(self.name, int) else {**dict(self.tag), self.name: value}

    def __str__(self) -> str:
        return f"[{self.name}]" if isinstance(self.name, int) else f".{self.name}"


def texts(kind: inspect.Type, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], inspect.Type]]:
    """(where, type) of every text and enumeration in ``kind``."""
    if isinstance(kind, inspect.Metadata):
        yield from texts(kind.type, path)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from texts(one, path)
    elif isinstance(kind, inspect.ListType):
        yield from texts(kind.item_type, (*path, Step(0)))
    elif isinstance(kind, inspect.StructType):
        tag = () if kind.tag_field is None else ((kind.tag_field, kind.tag),)
        for name, value in tag:
            yield (*path, Step(name)), inspect.LiteralType((value,))
        for field in kind.fields:
            yield from texts(field.type, (*path, Step(field.encode_name, tag)))
    elif isinstance(kind, inspect.StrType | inspect.LiteralType):
        yield path, kind


FOUND = [(body, path, kind) for body in BODIES for path, kind in texts(inspect.type_info(body))]
ENUMERATIONS = {(body, path): None for body, path, kind in FOUND if isinstance(kind, inspect.LiteralType) and isinstance(kind.values[0], str)}


def test_every_text_is_an_enumeration_or_known_to_be_free() -> None:
    names = {next(step.name for step in reversed(path) if isinstance(step.name, str)) for _, path, kind in FOUND if isinstance(kind, inspect.StrType)}
    assert names - set(f"{FREE} {COMPILED}".split()) - CHECKED_ELSEWHERE == set()


def test_no_pattern_lets_a_line_end_pass() -> None:
    """Python's $ matches before one at the end, too: a name that ends in it would break the header it stands in."""
    patterns = {kind.pattern for _, _, kind in FOUND if isinstance(kind, inspect.StrType) and kind.pattern is not None}
    assert len(patterns) > 1
    assert [pattern for pattern in patterns if not pattern.endswith(r"$(?!\n)")] == []


@pytest.mark.parametrize(("body", "path"), ENUMERATIONS, ids=lambda value: value.__name__ if isinstance(value, type) else "".join(map(str, value)))
def test_an_enumeration_takes_no_other_word(body: type[msgspec.Struct], path: tuple[Step, ...]) -> None:
    value: Any = "zzz"
    for step in reversed(path):
        value = step.around(value)
    with pytest.raises(ApiError) as refused:
        request_body.parse(value, body, strict=False)
    assert refused.value.status == 400
    assert refused.value.param == "".join(map(str, path))[1:]


@pytest.mark.parametrize(("path", "limit"), [("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})])
def test_reasoning_effort(api: Any, path: str, limit: dict[str, int]) -> None:
    body = {"messages": HI, **limit}
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
        assert api.http.post(path, json={**body, "reasoning_effort": effort}).status_code == 200
    for effort in ("zzz", "", "HIGH", 3):
        reply = api.http.post(path, json={**body, "reasoning_effort": effort})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")
    # Other words for a template that knows them go to the template.
    assert api.http.post(path, json={**body, "chat_template_kwargs": {"reasoning_effort": "zzz"}}).status_code == 200
