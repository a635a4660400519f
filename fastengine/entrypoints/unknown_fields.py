"""Which fields of a body its type doesn't have, at any depth: a misspelt one should not pass in silence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect


@dataclass
class _Shape:
    """What may stand in one place. ``is_free``: an object whose fields are the caller's own, such as a schema."""

    fields: dict[str, _Shape] = field(default_factory=dict)
    item: _Shape | None = None
    is_object: bool = False
    is_free: bool = False

    def may_hold_unknown(self) -> bool:
        """Whether looking into it is worth while: a list of a hundred thousand token ids isn't."""
        return (self.is_object and not self.is_free) or (self.item is not None and self.item.may_hold_unknown())

    def take(self, kind: inspect.Type) -> None:
        """Allow what ``kind`` allows, too."""
        if isinstance(kind, inspect.Metadata):
            self.take(kind.type)
        elif isinstance(kind, inspect.UnionType):
            for one in kind.types:
                self.take(one)
        elif isinstance(kind, inspect.ListType):
            self.item = self.item or _Shape()
            self.item.take(kind.item_type)
        elif isinstance(kind, inspect.StructType):
            self.is_object = True
            if kind.tag_field is not None:
                self.fields.setdefault(kind.tag_field, _Shape())
            for member in kind.fields:
                self.fields.setdefault(member.encode_name, _Shape()).take(member.type)
        elif isinstance(kind, inspect.DictType | inspect.AnyType | inspect.RawType):
            self.is_free = True


@functools.cache
def _shape_of(kind: type[msgspec.Struct]) -> _Shape:
    shape = _Shape()
    shape.take(inspect.type_info(kind))
    _forget_the_rest(shape)
    return shape


def _forget_the_rest(shape: _Shape) -> None:
    """Drop the items that can hold no unknown fields, so that nobody walks along them."""
    if shape.item is not None:
        _forget_the_rest(shape.item)
        if not shape.item.may_hold_unknown():
            shape.item = None
    for one in shape.fields.values():
        _forget_the_rest(one)


def nested_unknown_fields(value: dict[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    """The paths of fields inside of ``value``'s own that ``kind`` doesn't know, as in ``messages[0].zz``.

    One that is null asks for nothing and is left out: clients send back what they got, with all that was empty in it.
    """
    fields = _shape_of(kind).fields
    for name, inner in value.items():
        if isinstance(inner, dict | list) and name in fields:
            for rest in _unknown(inner, fields[name]):
                yield f"{name}{rest}"


def _unknown(value: dict[str, Any] | list[Any], shape: _Shape) -> Iterator[str]:
    """Ways on from ``value``, as in ``[0].zz``: put together on the way back, for those few that are found."""
    if isinstance(value, list):
        if shape.item is not None:
            for i, inner in enumerate(value):
                if isinstance(inner, dict | list):
                    for rest in _unknown(inner, shape.item):
                        yield f"[{i}]{rest}"
    elif shape.is_object and not shape.is_free:
        for name, inner in value.items():
            if name not in shape.fields:
                if inner is not None:
                    yield f".{name}"
            elif isinstance(inner, dict | list):
                for rest in _unknown(inner, shape.fields[name]):
                    yield f".{name}{rest}"
