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
    return shape


def nested_unknown_fields(value: dict[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    """The paths of fields inside of ``value``'s own that ``kind`` doesn't know, as in ``messages[0].zz``.

    One that is null asks for nothing and is left out: clients send back what they got, with all that was empty in it.
    """
    fields = _shape_of(kind).fields
    for name, inner in value.items():
        if name in fields:
            yield from _unknown(inner, fields[name], name)


def _unknown(value: Any, shape: _Shape, path: str) -> Iterator[str]:
    if isinstance(value, list):
        if shape.item is not None:
            for i, inner in enumerate(value):
                yield from _unknown(inner, shape.item, f"{path}[{i}]")
    elif isinstance(value, dict) and shape.is_object and not shape.is_free:
        for name, inner in value.items():
            if name in shape.fields:
                yield from _unknown(inner, shape.fields[name], f"{path}.{name}")
            elif inner is not None:
                yield f"{path}.{name}"
