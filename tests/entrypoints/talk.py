"""A server that parses what its model says, and what tests of chatting APIs look at beside the reply."""

from __future__ import annotations

import dataclasses

from fastengine.frontend.text_service import ModelText
from fastengine.protocol.tokens import unpack_token_ids
from fastengine.text.output_parser import OutputFormat
from fastengine.text.plugins import load_parsers
from tests.frontend.harness import ApiServer, model_text

ANSWER = "Hello, wörld 🌞!"
CALL = '<think>Hm.</think>Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


def text_with_parsers() -> ModelText:
    output_format = OutputFormat.from_names(load_parsers(), tool_parser="hermes", reasoning_parser="qwen3")
    return dataclasses.replace(model_text(), output_format=output_format)


def prompt_of(api: ApiServer) -> str:
    """Of the newest request."""
    return bytes(unpack_token_ids(api.engine.generated[-1].prompt_token_ids).tolist()).decode()
