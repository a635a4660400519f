"""Parting a model's reasoning from its answer, one parser per way of marking it."""

from fastengine.text.reasoning_parsers.base import ReasoningContext, ReasoningParser

__all__ = ["ReasoningContext", "ReasoningParser"]
