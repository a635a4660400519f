"""fastengine: a PaddlePaddle-native toolkit for deploying large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastengine.version import __version__

if TYPE_CHECKING:
    from fastengine.entrypoints.llm import LLM
    from fastengine.protocol.requests import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the offline interface on first use: an API process must start without it."""
    if name == "LLM":
        from fastengine.entrypoints.llm import LLM

        return LLM
    if name == "SamplingParams":
        from fastengine.protocol.requests import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
