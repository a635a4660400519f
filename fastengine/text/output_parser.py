"""From a sequence's text to reasoning, content and tool calls: the configured parsers put in a row.

::

    OutputText -> reasoning parser --content--> tool parser --> deltas
                        |
                        +--reasoning---------------------------> deltas

An :class:`OutputFormat` is made once per server from its flags; it makes an :class:`OutputParser` for
every sequence of a chat.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastengine.protocol.requests import GrammarSpec
from fastengine.text.deltas import Delta, merged
from fastengine.text.plugins import Parsers
from fastengine.text.reasoning_parsers.base import ReasoningContext, ReasoningParser
from fastengine.text.tool_parsers.base import ToolParser
from fastengine.text.tool_parsers.call_grammar import forced_call_parser, tool_grammar
from fastengine.text.tool_parsers.request import ToolRequest

NO_TOOLS = ToolRequest()
NO_CONTEXT = ReasoningContext()


class OutputParser:
    """Parses one sequence's text as it arrives. ``num_tool_calls`` counts the calls announced so far, and
    ``num_broken_calls`` those of them that turned out to be none.

    ``passthrough`` is True when nothing is configured: then all text is content, and a caller in a
    hurry need not call :meth:`feed`.
    """

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, *, parallel_tool_calls: bool = True):
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel_tool_calls
        self.num_tool_calls = 0
        self.num_broken_calls = 0
        self.passthrough = reasoning is None and tools is None

    def feed(self, text: str) -> list[Delta]:
        """The pieces that are certain once ``text`` has arrived, in order, neighbours joined."""
        if self.passthrough:
            return [Delta("content", text)] if text else []
        if self._reasoning is None:
            assert self._tools is not None
            return self._finished(self._tools.feed(text))
        return self._finished(self._tool_deltas(self._reasoning.feed(text)))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back, when the sequence has ended: ``cut`` off in the middle, or by itself."""
        deltas = self._tool_deltas(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            deltas += self._tools.finish(cut=cut)
        return self._finished(deltas)

    def _tool_deltas(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            out += self._tools.feed(delta.text) if delta.kind == "content" else [delta]
        return out

    def _finished(self, deltas: list[Delta]) -> list[Delta]:
        if not deltas:
            return deltas
        if not self._parallel:
            deltas = [delta for delta in deltas if delta.call_index == 0]
        self.num_tool_calls += sum(delta.name is not None for delta in deltas)
        self.num_broken_calls += sum(delta.broken for delta in deltas)
        return deltas if len(deltas) == 1 and (deltas[0].text or deltas[0].name is not None) else merged(deltas)


@dataclass(frozen=True)
class OutputFormat:
    """How the served model marks reasoning and tool calls; None: it is not looked for."""

    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None

    @staticmethod
    def from_names(parsers: Parsers, *, tool_parser: str | None, reasoning_parser: str | None) -> OutputFormat:
        """Raises ParserError for a name that ``parsers`` does not have."""
        return OutputFormat(
            parsers.tool_parser(tool_parser) if tool_parser else None,
            parsers.reasoning_parser(reasoning_parser) if reasoning_parser else None,
        )

    def grammar(self, tools: ToolRequest, *, max_tokens: int | None = None) -> GrammarSpec | None:
        """What the answer must match for the sake of its tool calls, or None; see :func:`tool_grammar`."""
        return tool_grammar(tools, self.tool_parser, max_tokens=max_tokens)

    def needs_special_tokens(self, tools: ToolRequest = NO_TOOLS) -> bool:
        """Whether the sequence must be detokenized with its special tokens for its markers to be seen."""
        if tools.forced:
            return False
        in_tools = tools.mode == "auto" and self.tool_parser is not None and self.tool_parser.needs_special_tokens
        return in_tools or (self.reasoning_parser is not None and self.reasoning_parser.needs_special_tokens)

    def parser(self, tools: ToolRequest = NO_TOOLS, context: ReasoningContext = NO_CONTEXT, *, whole: bool = False) -> OutputParser:
        """A parser for one sequence, which nobody sees grow if ``whole``.

        A forced call's grammar leaves no room for reasoning, so none is looked for then.
        """
        reasoning = self.reasoning_parser(context) if self.reasoning_parser is not None and not tools.forced else None
        in_tools: ToolParser | None = None
        if tools.forced:
            in_tools = forced_call_parser(tools)
        elif self.tool_parser is not None and tools.mode == "auto":
            in_tools = self.tool_parser(tools.tools)
        if in_tools is not None:
            in_tools.whole_calls = whole
        return OutputParser(reasoning, in_tools, parallel_tool_calls=tools.parallel)
