"""POST /v1/chat/completions"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastengine.entrypoints.openai.chat_job import ChatFinishReason, ChatJob, ChatReader, prepare_chat
from fastengine.entrypoints.openai.chunks import ChunkWriter, PlainChunks
from fastengine.entrypoints.openai.endpoint import GeneratingEndpoint, raise_error
from fastengine.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from fastengine.entrypoints.openai.refused_fields import REFUSED_BY_CHAT
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest
from fastengine.entrypoints.openai.response_types import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    FunctionCall,
    TokenLogprob,
    ToolCall,
    Usage,
)
from fastengine.entrypoints.responses import DONE_EVENT, EventWriter
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import TextStream, TextUpdate
from fastengine.protocol.outputs import TopLogprobs
from fastengine.text.deltas import Delta


class ChatEndpoint(GeneratingEndpoint[ChatCompletionRequest, ChatJob]):
    body_type = ChatCompletionRequest
    refused = REFUSED_BY_CHAT
    id_prefix = "chatcmpl"

    async def prepare(self, body: ChatCompletionRequest, request_id: str, model: str, text: ModelText) -> ChatJob:
        return await prepare_chat(self._front.text, text, body, request_id=request_id, model=model)

    async def answer(self, job: ChatJob, text: ModelText, stream: TextStream) -> ChatCompletion:
        reader = ChatReader(job, stream, whole=True)
        answers = [ChatAnswer() for _ in stream.sequences]
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates, job.grammar_param)
            for update in updates:
                answers[update.index].add(update, reader, text, with_logprobs=bool(job.fields.logprobs))
        completion = ChatCompletion(
            id=job.request_id,
            created=job.created,
            model=job.model,
            choices=[answers[sequence].choice(i, job) for i, sequence in enumerate(job.chosen(stream.sequences))],
            usage=job.usage(stream.sequences),
        )
        prompt = next((answer.prompt_logprobs for answer in answers if answer.prompt_logprobs is not None), None)
        if prompt is not None:
            completion.prompt_logprobs = prompt_logprobs(job.prompts[0].token_ids, prompt, text.tokenizer)
        return completion

    async def stream(self, job: ChatJob, text: ModelText, stream: TextStream, writer: EventWriter) -> None:
        events = ChatEvents(job, text, stream)
        events.write_plainly(writer)
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates, job.grammar_param)
            parts = [part for update in updates for part in events.of(update)]
            if stream.finished:
                parts += events.end()
            if parts:
                await writer.write(b"".join(parts), last=stream.finished)


class ChatEvents:
    """Turns updates into the events of one stream."""

    def __init__(self, job: ChatJob, text: ModelText, stream: TextStream):
        options = job.fields.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._chunks = ChunkWriter(
            {"id": job.request_id, "object": "chat.completion.chunk", "created": job.created, "model": job.model},
            before_text=b'"delta":{"content":',
            after_text=b"}",
            usage_field=self._include_usage,
        )
        self._job = job
        self._text = text
        self._stream = stream
        self._reader = ChatReader(job, stream)
        self._begun: set[int] = set()
        self._with_token_ids = bool(job.fields.return_token_ids)

    def write_plainly(self, writer: EventWriter) -> None:
        """Have text that comes with nothing else written past :meth:`of`, where a chunk holds nothing else."""
        if writer.direct is not None and self._reader.passthrough and not (self._with_token_ids or self._continuous):
            self._stream.take_plainly(PlainChunks(self._chunks, self._begun, writer.direct, self._stream.sequences).take)

    def of(self, update: TextUpdate) -> list[bytes]:
        events = []
        if update.index not in self._begun:
            self._begun.add(update.index)
            events.append(self._first(update))
        plain = not (update.logprobs or self._with_token_ids or update.finish_reason or self._continuous)
        if plain and self._reader.passthrough:
            if update.text:
                events.append(self._chunks.plain(update.index, update.text))
            return events
        deltas = [delta_fields(delta) for delta in self._reader.deltas(update) if not delta.broken]
        if plain:
            return events + [self._chunks.delta(update.index, delta) for delta in deltas]
        if not deltas:
            deltas.append({"content": ""} if self._reader.passthrough else {})
        events += [self._chunks.delta(update.index, delta, usage=self._usage_so_far()) for delta in deltas[:-1]]
        events.append(self._full(update, deltas[-1]))
        return events

    def _full(self, update: TextUpdate, delta: dict[str, Any]) -> bytes:
        """The last chunk of an update, with all that belongs to its tokens."""
        if self._with_token_ids:
            delta["completion_token_ids"] = update.token_ids
        return self._chunks.delta(
            update.index,
            delta,
            logprobs={"content": chat_logprobs(update.token_ids, update.logprobs, self._text.tokenizer)} if update.logprobs else None,
            finish_reason=self._reader.finish_reason(update),
            stop_reason=update.stop_reason,
            usage=self._usage_so_far(),
        )

    def _usage_so_far(self) -> Usage | None:
        """What every chunk has with ``continuous_usage_stats``."""
        return self._job.usage(self._stream.sequences) if self._continuous else None

    def _first(self, update: TextUpdate) -> bytes:
        job = self._job
        delta: dict[str, Any] = {"role": "assistant", "content": job.echo}
        if self._with_token_ids:
            delta["prompt_token_ids"] = job.prompts[0].token_ids
        if update.prompt_logprobs is not None:
            delta["prompt_logprobs"] = prompt_logprobs(job.prompts[0].token_ids, update.prompt_logprobs, self._text.tokenizer)
        return self._chunks.delta(update.index, delta, usage=self._usage_so_far())

    def end(self) -> list[bytes]:
        usage = [self._chunks.usage(self._job.usage(self._stream.sequences))] if self._include_usage else []
        return [*usage, DONE_EVENT]


def delta_fields(delta: Delta) -> dict[str, Any]:
    """A piece of an answer as the fields of a chunk's ``delta``."""
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.call_index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": delta.text}
    return {"tool_calls": [{"index": delta.call_index, "id": delta.call_id, "type": "function", "function": function}]}


@dataclass
class ChatAnswer:
    """One choice while it grows."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs | None] | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, update: TextUpdate, reader: ChatReader, text: ModelText, *, with_logprobs: bool) -> None:
        for delta in reader.deltas(update):
            self._add_delta(delta)
        self.token_ids += update.token_ids
        if with_logprobs:
            self.logprobs += chat_logprobs(update.token_ids, update.logprobs, text.tokenizer)
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.finish_reason, self.stop_reason = reader.finish_reason(update), update.stop_reason

    def _add_delta(self, delta: Delta) -> None:
        if delta.kind == "content":
            self.content.append(delta.text)
        elif delta.kind == "reasoning":
            self.reasoning.append(delta.text)
        elif delta.name is not None:
            assert delta.call_id is not None  # every call's first delta has both
            self.tool_calls.append(ToolCall(id=delta.call_id, function=FunctionCall(name=delta.name, arguments=delta.text)))
        else:
            self.tool_calls[-1].function.arguments += delta.text

    def message(self, job: ChatJob) -> AssistantMessage:
        content = job.echo + "".join(self.content)
        message = AssistantMessage(content=content if content or not self.tool_calls else None)
        if self.reasoning:
            message.reasoning_content = "".join(self.reasoning)
        if self.tool_calls:
            message.tool_calls = self.tool_calls
        if job.fields.return_token_ids:
            message.prompt_token_ids = list(job.prompts[0].token_ids)
            message.completion_token_ids = self.token_ids
        return message

    def choice(self, index: int, job: ChatJob) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self.message(job),
            logprobs=ChatLogprobs(content=self.logprobs) if job.fields.logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
