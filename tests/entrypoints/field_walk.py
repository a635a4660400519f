"""Every field of a body's type, with values it can't take, each in a body that is fine otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

MANY = 10**30
HALF_PAIR = "a\ud800"
# A value of each JSON type, and one of another shape where that matters.
WRONG_TYPES: dict[str, tuple[Any, ...]] = {
    "boolean": (True,),
    "integer": (5,),
    "number": (1.5,),
    "string": ("zz",),
    "array": ([], [[]]),
    "object": ({}, {"zz": {"zz": 1}}),
}


@dataclass(frozen=True)
class BadField:
    """``value`` at ``path`` of a body (names and indices); ``param`` is that path as a caller writes it."""

    path: tuple[str | int, ...]
    value: Any
    body: dict[str, Any]

    @property
    def param(self) -> str:
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)[1:]


def bad_fields(kind: type[msgspec.Struct], base: dict[str, Any]) -> Iterator[BadField]:
    """``base`` is a good body."""
    for path, types, around in _places(inspect.type_info(kind), base):
        for value in bad_values(types):
            yield BadField(path, value, around(value))


def _places(kind: inspect.Type, base: Any, path: tuple[str | int, ...] = ()) -> Iterator[Any]:
    """(path, the types that may stand there, a function from a value to the whole with that value in it)"""
    types = _alternatives(kind)
    if path:
        yield path, types, lambda value: value
    for one in types:
        if isinstance(one, inspect.StructType):
            whole = base if isinstance(base, dict) else example(one)
            for field in one.fields:
                for below, kinds, around in _places(field.type, whole.get(field.encode_name), (*path, field.encode_name)):
                    yield below, kinds, lambda value, name=field.encode_name, around=around, whole=whole: {**whole, name: around(value)}
        elif isinstance(one, inspect.ListType):
            first = base[0] if isinstance(base, list) and base else None
            for below, kinds, around in _places(one.item_type, first, (*path, 0)):
                yield below, kinds, lambda value, around=around: [around(value)]


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for part in kind.types for one in _alternatives(part)]
    return [kind]


def example(kind: inspect.Type) -> Any:
    """The least that ``kind`` takes."""
    one = _alternatives(kind)[0]
    if isinstance(one, inspect.StructType):
        tag = {} if one.tag_field is None else {one.tag_field: one.tag}
        return tag | {field.encode_name: example(field.type) for field in one.fields if field.required}
    if isinstance(one, inspect.ListType):
        return [example(one.item_type)] * (one.min_length or 0)
    if isinstance(one, inspect.LiteralType):
        return one.values[0]
    if isinstance(one, inspect.StrType):
        return "a"
    if isinstance(one, inspect.BoolType):
        return False
    return {} if isinstance(one, inspect.DictType) else 1


def json_type(kind: inspect.Type) -> str:
    names: dict[type, str] = {
        inspect.BoolType: "boolean",
        inspect.IntType: "integer",
        inspect.FloatType: "number",
        inspect.StrType: "string",
        inspect.ListType: "array",
        inspect.DictType: "object",
        inspect.StructType: "object",
        inspect.NoneType: "null",
        inspect.AnyType: "any",
    }
    if isinstance(kind, inspect.LiteralType):
        return "literal-boolean" if isinstance(kind.values[0], bool) else "literal"
    return names[type(kind)]


def bad_values(types: list[inspect.Type]) -> Iterator[Any]:
    allowed = {json_type(one) for one in types}
    if "any" in allowed:
        return
    if "number" in allowed:
        allowed.add("integer")
    if "null" not in allowed:
        yield None
    for name, values in WRONG_TYPES.items():
        if name not in allowed:
            yield from values if name != "boolean" or "literal-boolean" not in allowed else (not True,)
    for one in types:
        if isinstance(one, inspect.StrType):
            yield HALF_PAIR
            if one.min_length:
                yield ""
            if one.max_length:
                yield "x" * (one.max_length + 1)
            if one.pattern:
                yield from ("", "a\nb", "é")
        elif isinstance(one, inspect.IntType | inspect.FloatType):
            yield from (math.nan, math.inf, -math.inf, MANY, 1e30)
            low = one.ge if one.ge is not None else one.gt
            if low is not None:
                yield from (low - 1, -MANY)
            if one.le is not None:
                yield one.le * 2 + 1
        elif isinstance(one, inspect.ListType):
            if one.min_length:
                yield []
            if one.max_length:
                yield [example(one.item_type) or "a"] * (one.max_length + 1)
        elif isinstance(one, inspect.DictType) and "null" in allowed | {"null"}:
            yield {HALF_PAIR: 1}
