"""JSON for server-sent events: one line for every reader.

The protocol ends lines with CR and LF alone, which JSON escapes anyway. Some clients split at everything that
Unicode calls a line's end, httpx's ``iter_lines`` among them: the three of these that JSON may hold as they are
get escaped, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\u0085\u2028\u2029")


def event_json(value: Any) -> bytes:
    """``value`` as JSON, whose text holds no line's end of any kind."""
    data = _encode(value)
    if not data.isascii():
        # Outside of strings JSON is ASCII: what is found stands in one.
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data
