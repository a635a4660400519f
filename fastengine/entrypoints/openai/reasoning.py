"""Where an answer's reasoning begins and ends, in tokens, for what the worker must know of it."""

from __future__ import annotations

from collections.abc import Sequence

from fastengine.protocol.requests import ReasoningSpec
from fastengine.text.reasoning_parsers.base import ReasoningContext, ReasoningParser
from fastengine.text.reasoning_parsers.think_tags import ThinkTagParser
from fastengine.text.tokenizer import Tokenizer

# Enough of a prompt's end to hold a marker and the white space around it.
END_TOKENS = 32


def reasoning_context(tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, enable_thinking: bool | None) -> ReasoningContext:
    """``text`` is the rendered prompt, None if the client sent ``token_ids``."""
    if text is None:
        text = tokenizer.decode(list(token_ids[-END_TOKENS:]), skip_special_tokens=False)
    return ReasoningContext(text, enable_thinking)


def can_mark(parser: type[ReasoningParser], tokenizer: Tokenizer) -> bool:
    """Whether the worker can tell where reasoning ends: its end marker is one token."""
    return issubclass(parser, ThinkTagParser) and tokenizer.token_id(parser.END) is not None


def reasoning_spec(parser: type[ReasoningParser], context: ReasoningContext, tokenizer: Tokenizer, max_tokens: int | None) -> ReasoningSpec | None:
    """The reasoning that may come before the answer, None if none may. Needs :func:`can_mark`."""
    assert issubclass(parser, ThinkTagParser)
    end_id = tokenizer.token_id(parser.END)
    assert end_id is not None
    if parser(context).starts_inside(context):
        return ReasoningSpec(end_token_id=end_id, starts_inside=True, max_tokens=max_tokens)
    if context.enable_thinking is False or context.prompt.rstrip().endswith(parser.END):
        return None
    begin_id = tokenizer.token_id(parser.BEGIN)
    return None if begin_id is None else ReasoningSpec(end_token_id=end_id, begin_token_id=begin_id, max_tokens=max_tokens)
