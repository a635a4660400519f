"""Values that JSON's grammar has and nobody can use: where in a body they stand.

Python's own ``json`` writes half of a surrogate pair, and ``NaN``, without a complaint. msgspec refuses the whole body
for one, at a byte; here the field is found, for a message that its sender understands.
"""

from __future__ import annotations

import json
import math
from typing import Any

# Larger bodies are refused without a field's name. Texts are searched at once; what takes longest, as many empty lists as
# such a body holds, is a tenth of a second of the event loop's time.
MAX_SEARCHED_BYTES = 512 << 10
HALF_PAIR = "holds half of a surrogate pair, which is no character"
NO_NUMBER = "is not a finite number"
SEARCHED = frozenset({str, float, list, dict})


def unusable_value(body: bytes) -> tuple[str, str] | None:
    """(path, what is wrong) of the first such value in ``body``, an object; None if that is not what is wrong with it, or not to be found."""
    if len(body) > MAX_SEARCHED_BYTES:
        return None
    try:
        found = _unusable(json.loads(body))
    except (ValueError, RecursionError):
        return None
    return None if found is None else (found[0].removeprefix("."), found[1])


def _unusable(value: Any) -> tuple[str, str] | None:
    """Of ``value`` itself or in it. Ways to a value are put together on the way back, for the one that is found."""
    if isinstance(value, str):
        return ("", HALF_PAIR) if has_half_pair(value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", NO_NUMBER)
    if isinstance(value, dict):
        for name, inner in value.items():
            if has_half_pair(name):
                return "", f"the name of a field {HALF_PAIR}"
            if type(inner) in SEARCHED and (found := _unusable(inner)) is not None:
                return f".{name}{found[0]}", found[1]
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if type(inner) in SEARCHED and (found := _unusable(inner)) is not None:
                return f"[{i}]{found[0]}", found[1]
    return None


def has_half_pair(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
