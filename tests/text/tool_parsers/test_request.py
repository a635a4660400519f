"""Which tools a request has and what its tool_choice means, and what is refused with which field named."""

from __future__ import annotations

from typing import Any

import pytest

from fastengine.text.tool_parsers import ToolRequestError, tool_request
from tests.text.tool_parsers.parsing import TOOLS

NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        (None, None, "none", []),
        ([], "auto", "none", []),
        (TOOLS, None, "auto", ["f", "get_weather"]),
        (TOOLS, "none", "none", ["f", "get_weather"]),
        (TOOLS, "required", "required", ["f", "get_weather"]),
        (TOOLS, NAMED, "named", ["f"]),
        ([{"type": "function", "name": "f", "parameters": None}], {"type": "function", "name": "f"}, "named", ["f"]),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, "required", ["f"]),
        (TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, "auto", ["f"]),
    ],
)
def test_modes(tools: Any, choice: Any, mode: str, names: list[str]) -> None:
    request = tool_request(tools, choice, parallel_tool_calls=False)
    assert (request.mode, [tool.name for tool in request.tools], request.parallel) == (mode, names, False)
    assert request.forced == (mode in ("required", "named"))
    assert tool_request(tools, choice).parallel


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        (None, NAMED, "tool_choice"),
        (TOOLS, "perhaps", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
        (TOOLS, {"type": "function"}, "tool_choice.name"),
        (TOOLS, {"type": "other", "function": {"name": "f"}}, "tool_choice.type"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools"),
        (TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]}, "tool_choice.tools[0].name"),
        ([*TOOLS, TOOLS[0]], None, "tools[2].function.name"),
        ([{"type": "web_search"}], None, "tools[0].type"),
        (["f"], None, "tools[0].type"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 'a"b'}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], None, "tools[0].function.parameters.type"),
        ([{"type": "function", "function": {"name": "f", "strict": "yes"}}], None, "tools[0].function.strict"),
        ([{"type": "function", "function": None}], None, "tools[0].function"),
    ],
)
def test_refused(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(ToolRequestError) as caught:
        tool_request(tools, choice)
    assert caught.value.param == param
