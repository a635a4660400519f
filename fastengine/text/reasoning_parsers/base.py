"""What every reasoning parser is: a text in pieces goes in, reasoning and content come out.

To write one for ``--tool-parser-plugin``, derive from :class:`ReasoningParser` and register the class
in the plug-in's ``register(parsers)``. The pieces may be cut anywhere and must give the same as the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fastengine.text.deltas import Delta


@dataclass(frozen=True)
class ReasoningContext:
    """What is known before the first token. ``prompt`` is the rendered prompt's text (its end is enough), or ``""`` if unknown.

    ``enable_thinking`` is what the request says, None if it says nothing.
    """

    prompt: str = ""
    enable_thinking: bool | None = None


class ReasoningParser(ABC):
    """Parts reasoning from content in one sequence's text. One instance per sequence.

    ``needs_special_tokens`` says that its markers may be special tokens, so the text must be decoded with them.
    """

    needs_special_tokens: ClassVar[bool] = True

    def __init__(self, context: ReasoningContext):
        self.context = context

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """The pieces, of kind ``reasoning`` or ``content``, that are certain once ``text`` has arrived."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """What was held back, when the sequence has ended."""
