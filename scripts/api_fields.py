"""Print the table of request fields in docs/api.md, from the structs that check them: ``python scripts/api_fields.py``."""

from __future__ import annotations

from typing import Any

import msgspec

from fastengine.entrypoints.openai.refused_fields import REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CompletionRequest


def descriptions(body: type) -> dict[str, str]:
    """Field -> its description, in the order of the struct."""
    _, components = msgspec.json.schema_components([body])
    properties: dict[str, dict[str, Any]] = components[body.__name__]["properties"]
    return {name: properties[name].get("description", "") for name in body.__struct_fields__}


def fields_table() -> str:
    chat, completions = descriptions(ChatCompletionRequest), descriptions(CompletionRequest)
    rows = ["| field | chat | completions | |", "|---|---|---|---|"]
    for name in dict.fromkeys([*chat, *completions]):
        both = chat.get(name, ""), completions.get(name, "")
        text = both[0] if both[0] == both[1] or not both[1] else " / ".join(part for part in both if part)
        neutral = neutral_values(name)
        text += f" Where refused: may be {neutral}." if neutral else ""
        rows.append(f"| `{name}` | {'yes' if name in chat else 'refused'} | {'yes' if name in completions else 'refused'} | {text} |")
    for name in sorted({*REFUSED_BY_CHAT, *REFUSED_BY_COMPLETIONS} - {*chat, *completions}):
        refused = ["refused" if name in table else "" for table in (REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS)]
        neutral = neutral_values(name)
        rows.append(f"| `{name}` | {refused[0]} | {refused[1]} | {'may be ' + neutral if neutral else ''} |")
    return "\n".join(rows)


def neutral_values(name: str) -> str:
    """What a refused field may hold, being nothing but its default; ``""`` for a field that neither refuses."""
    values = REFUSED_BY_CHAT.get(name, REFUSED_BY_COMPLETIONS.get(name, ()))
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)


if __name__ == "__main__":
    print(fields_table())
