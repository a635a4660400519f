"""What a request says about tools: which there are, and whether and which the model must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_TOOLS = 1024


class ToolRequestError(ValueError):
    """The request's tools are unusable. ``param`` names the field, ``message`` says what is wrong with it."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


@dataclass(frozen=True)
class ToolSpec:
    """A function the model may call. ``parameters`` is a JSON schema; ``strict`` asks that arguments always match it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class ToolRequest:
    """``mode`` ``required`` means that at least one of ``tools`` must be called, ``named`` that the only one in ``tools`` must be."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    tools: tuple[ToolSpec, ...] = ()
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


def tool_request(tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolRequest:
    """From the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as OpenAI's chat API has them, decoded from JSON.

    Tools of the Responses API (``{"type": "function", "name": ...}``) are understood too, and so is its
    ``tool_choice`` and ``allowed_tools``. Raises ToolRequestError.
    """
    specs = _tool_specs(tools or ())
    parallel = parallel_tool_calls is not False
    choice = tool_choice if tool_choice is not None else ("auto" if specs else "none")
    if choice == "none" or (choice == "auto" and not specs):
        return ToolRequest("none", tuple(specs.values()), parallel)
    if not specs:
        raise ToolRequestError("tool_choice", "can't ask for a tool call without tools")
    if choice in ("auto", "required"):
        return ToolRequest("auto" if choice == "auto" else "required", tuple(specs.values()), parallel)
    if not isinstance(choice, Mapping):
        raise ToolRequestError("tool_choice", "must be 'none', 'auto', 'required' or an object that names a function")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, specs, parallel)
    return ToolRequest("named", (_chosen(choice, specs, "tool_choice"),), parallel)


def _tool_specs(tools: Sequence[Any]) -> dict[str, ToolSpec]:
    if len(tools) > MAX_TOOLS:
        raise ToolRequestError("tools", f"{len(tools)} tools; {MAX_TOOLS} are allowed")
    specs: dict[str, ToolSpec] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ToolRequestError(f"{where}.type", "only tools of type 'function' are supported")
        function, where = (tool["function"], f"{where}.function") if "function" in tool else (tool, where)
        spec = _tool_spec(function, where)
        if spec.name in specs:
            raise ToolRequestError(f"{where}.name", f"there is another tool of the name {spec.name!r}")
        specs[spec.name] = spec
    return specs


def _tool_spec(function: Any, where: str) -> ToolSpec:
    if not isinstance(function, Mapping):
        raise ToolRequestError(where, "must be an object")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ToolRequestError(f"{where}.name", "must be 1 to 128 letters, digits, underscores, dots or hyphens")
    if not isinstance(function.get("description"), str | None):
        raise ToolRequestError(f"{where}.description", "must be a string")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ToolRequestError(f"{where}.parameters", "must be a JSON schema object")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise ToolRequestError(f"{where}.parameters.type", "must be 'object': arguments are passed by name")
    if strict is not None and not isinstance(strict, bool):
        raise ToolRequestError(f"{where}.strict", "must be true or false")
    # No parameters at all means that the function takes none.
    schema = parameters if parameters else {"type": "object", "properties": {}}
    return ToolSpec(name, schema, bool(strict))


def _chosen(choice: Any, specs: Mapping[str, ToolSpec], where: str) -> ToolSpec:
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        raise ToolRequestError(f"{where}.type", "must be 'function'")
    function, where = (choice["function"], f"{where}.function") if "function" in choice else (choice, where)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ToolRequestError(f"{where}.name", "must name one of the tools")
    if name not in specs:
        raise ToolRequestError(f"{where}.name", f"{name!r} is none of the tools ({', '.join(specs)})")
    return specs[name]


def _allowed(choice: Mapping[str, Any], specs: Mapping[str, ToolSpec], parallel: bool) -> ToolRequest:
    # The chat API nests what the Responses API has on the object itself.
    inner = choice.get("allowed_tools", choice)
    where = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
    chosen = inner.get("tools") if isinstance(inner, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        raise ToolRequestError(where, "must have a mode, 'auto' or 'required', and a list of tools that is not empty")
    tools = {spec.name: spec for spec in (_chosen(tool, specs, f"{where}.tools[{i}]") for i, tool in enumerate(chosen))}
    return ToolRequest("required" if mode == "required" else "auto", tuple(tools.values()), parallel)
