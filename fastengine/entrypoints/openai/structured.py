"""What a request says about the shape of its answer, as one grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastengine.entrypoints.openai.request_types import GenerationFields, ResponseFormat
from fastengine.frontend.errors import bad_request
from fastengine.protocol.requests import GrammarSpec


@dataclass(frozen=True)
class StructuredOutput:
    """``param`` is the field that asked for ``grammar``."""

    param: str
    grammar: GrammarSpec


def structured_output(body: GenerationFields) -> StructuredOutput | None:
    """The one grammar that ``body`` asks for, not compiled yet. Raises ApiError 400 when it asks for several."""
    found = [*_guided(body), *_structured_outputs(body)]
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if len(found) > 1:
        raise bad_request(found[1].param, f"can't be used together with {found[0].param}")
    return found[0] if found else None


def _guided(body: GenerationFields) -> list[StructuredOutput]:
    fields = (
        ("guided_json", "json_schema", body.guided_json),
        ("guided_json_object", "json_object", "" if body.guided_json_object else None),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "lark", body.guided_grammar),
        ("structural_tag", "structural_tag", body.structural_tag),
    )
    return [StructuredOutput(param, _spec(kind, value)) for param, kind, value in fields if value is not None]


def _structured_outputs(body: GenerationFields) -> list[StructuredOutput]:
    given = body.structured_outputs
    if given is None:
        return []
    fields = (
        ("json", "json_schema", given.json),
        ("json_object", "json_object", "" if given.json_object else None),
        ("regex", "regex", given.regex),
        ("choice", "choice", given.choice),
        ("grammar", "lark", given.grammar),
        ("structural_tag", "structural_tag", given.structural_tag),
    )
    if all(getattr(given, name) is None for name in given.__struct_fields__):
        raise bad_request("structured_outputs", f"needs one of {', '.join(given.__struct_fields__)}")
    return [StructuredOutput(f"structured_outputs.{name}", _spec(kind, value)) for name, kind, value in fields if value is not None]


def _response_format(given: ResponseFormat) -> list[StructuredOutput]:
    if given.type == "text":
        return []
    if given.type == "json_object":
        return [StructuredOutput("response_format", _spec("json_object", ""))]
    if given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request("response_format.json_schema", "this field is required with the type json_schema")
        if given.json_schema.schema is None:
            raise bad_request("response_format.json_schema.schema", "this field is required")
        return [StructuredOutput("response_format.json_schema.schema", _spec("json_schema", given.json_schema.schema))]
    tags = {"structures": given.structures, "triggers": given.triggers}
    return [StructuredOutput("response_format", _spec("structural_tag", tags))]


def _spec(kind: str, value: Any) -> GrammarSpec:
    # A schema's order of properties is the order they are generated in: it is kept.
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
