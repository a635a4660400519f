"""Finding tool calls in a model's answer, one parser per format, and grammars that make a model call."""

from fastengine.text.deltas import Delta
from fastengine.text.tool_parsers.base import ToolParser
from fastengine.text.tool_parsers.request import ToolRequest, ToolRequestError, ToolSpec, tool_request

__all__ = ["Delta", "ToolParser", "ToolRequest", "ToolRequestError", "ToolSpec", "tool_request"]
