"""A chat ready for the engine, and its answer in reasoning, content and tool calls.

Every endpoint that chats goes through here: it makes a :class:`ChatCompletionRequest` of its body,
:func:`prepare_chat` makes a job of that, and :class:`ChatReader` reads the answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import msgspec

from fastengine.entrypoints.openai.chat_prompt import chat_prompt, echoed, thinking_enabled
from fastengine.entrypoints.openai.generation import Job, Prompt, check_length, check_num_sequences, now_s, num_generated
from fastengine.entrypoints.openai.reasoning import can_mark, reasoning_context, reasoning_spec
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest
from fastengine.entrypoints.openai.sampling import sampling_params
from fastengine.entrypoints.openai.structured import structured_output
from fastengine.frontend.errors import bad_request
from fastengine.frontend.text_service import ModelText, TextService
from fastengine.frontend.text_stream import TextStream, TextUpdate
from fastengine.protocol.outputs import FinishReason
from fastengine.protocol.requests import GrammarSpec, SamplingParams
from fastengine.text.deltas import Delta
from fastengine.text.output_parser import OutputFormat, OutputParser
from fastengine.text.reasoning_parsers.base import ReasoningContext
from fastengine.text.tool_parsers.request import ToolRequest, ToolRequestError, tool_request

ChatFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, kw_only=True)
class ChatJob(Job):
    """``format`` is how this answer is to be read, ``echo`` the text its content begins with."""

    fields: ChatCompletionRequest
    format: OutputFormat
    tools: ToolRequest
    context: ReasoningContext
    echo: str

    def parser(self, *, whole: bool = False) -> OutputParser:
        """A parser for one of the job's sequences, which nobody sees grow if ``whole``."""
        return self.format.parser(self.tools, self.context, whole=whole)


async def prepare_chat(service: TextService, text: ModelText, body: ChatCompletionRequest, *, request_id: str, model: str) -> ChatJob:
    """Check what needs the model, render and tokenize the prompt, compile the grammar. Raises ApiError."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise bad_request("max_tokens", "expected int >= 1")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "only allowed when logprobs is true")
    sampling = sampling_params(body, text, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    check_num_sequences("n", 1, num_generated(body))
    tools = _tools(body, text.output_format)
    grammar_param, grammar = await _grammar(service, body, tools, text.output_format, max_tokens)
    param, prompt = await chat_prompt(service, text, body, with_tools=tools.mode != "none")
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_length(param, len(prompt.token_ids), max_tokens, text.max_model_len, limit_param=limit)
    context = reasoning_context(text.tokenizer, prompt.token_ids, prompt.text, thinking_enabled(body))
    output_format, sampling = _constrained(body, text, tools, context, msgspec.structs.replace(sampling, grammar=grammar))
    if output_format.needs_special_tokens(tools):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    return ChatJob(
        request_id=request_id,
        created=now_s(),
        model=model,
        fields=body,
        prompts=[Prompt(prompt.token_ids, prompt.text)],
        sampling=sampling,
        n=num_generated(body),
        grammar_param=grammar_param,
        format=output_format,
        tools=tools,
        context=context,
        echo=echoed(body),
    )


def checked_tools(body: ChatCompletionRequest) -> ToolRequest:
    """What ``body`` says about tools. Raises ApiError 400."""
    try:
        return tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    except ToolRequestError as error:
        raise bad_request(error.param, error.message) from None


def _tools(body: ChatCompletionRequest, output_format: OutputFormat) -> ToolRequest:
    tools = checked_tools(body)
    if tools.mode == "auto" and output_format.tool_parser is None:
        raise bad_request(
            "tools", "the server was started without --tool-call-parser: it can only be told to call (tool_choice required, or a function)"
        )
    return tools


async def _grammar(
    service: TextService, body: ChatCompletionRequest, tools: ToolRequest, output_format: OutputFormat, max_tokens: int | None
) -> tuple[str | None, GrammarSpec | None]:
    """What the answer must match: the request's own grammar, or the one its tools need; before it the field that asks for it."""
    asked = structured_output(body)
    if asked is not None:
        if tools.forced:
            raise bad_request("tool_choice", f"can't ask for a call together with {asked.param}")
        await service.check_grammar(asked.param, asked.grammar)
        return asked.param, asked.grammar
    grammar = output_format.grammar(tools, max_tokens=max_tokens)
    if grammar is None:
        return None, None
    await service.check_grammar("tools", grammar)
    return "tools", grammar


def _constrained(
    body: ChatCompletionRequest, text: ModelText, tools: ToolRequest, context: ReasoningContext, sampling: SamplingParams
) -> tuple[OutputFormat, SamplingParams]:
    """How the answer is read, and its sampling with what the worker must know of its reasoning."""
    output_format, budget = text.output_format, body.reasoning_max_tokens
    parser = output_format.reasoning_parser
    if tools.forced:
        parser = None
    marked = parser is not None and can_mark(parser, text.tokenizer)
    if budget is not None and not marked:
        raise bad_request("reasoning_max_tokens", "needs --reasoning-parser with a marker that is one token of the model's, and no forced tool call")
    if budget is None and sampling.grammar is None:
        return output_format, sampling
    if parser is None or not marked:
        # The grammar holds from the first token on: there is no reasoning to look for.
        return dataclasses.replace(output_format, reasoning_parser=None), sampling
    return output_format, msgspec.structs.replace(sampling, reasoning=reasoning_spec(parser, context, text.tokenizer, budget))


class ChatReader:
    """The parsers of a job's sequences; ``whole``: nobody sees them grow."""

    def __init__(self, job: ChatJob, stream: TextStream, *, whole: bool = False):
        self._parsers = [job.parser(whole=whole) for _ in stream.sequences]
        self._with_reasoning = job.fields.include_reasoning is not False
        # All text is content: the deltas need not be looked at.
        self.passthrough = all(parser.passthrough for parser in self._parsers)

    def deltas(self, update: TextUpdate) -> list[Delta]:
        """What an update adds, in order; all of it once the sequence has ended."""
        parser = self._parsers[update.index]
        deltas = parser.feed(update.text) if update.text else []
        if update.finish_reason is not None:
            deltas += parser.finish(cut=update.finish_reason != "stop")
        return deltas if self._with_reasoning else [delta for delta in deltas if delta.kind != "reasoning"]

    def finish_reason(self, update: TextUpdate) -> ChatFinishReason | None:
        """The update's, or ``tool_calls`` when an answer that came to its own end has calls, all of them as they were begun."""
        parser = self._parsers[update.index]
        if update.finish_reason == "stop" and parser.num_tool_calls and not parser.num_broken_calls:
            return "tool_calls"
        return update.finish_reason
