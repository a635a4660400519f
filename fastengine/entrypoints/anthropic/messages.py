"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's SDKs speak them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fastengine.entrypoints.anthropic.conversion import chat_request, rename
from fastengine.entrypoints.anthropic.message_types import (
    CountTokensBody,
    CountTokensReply,
    MessageReply,
    MessagesBody,
    ReplyBlock,
    ReplyTextBlock,
    ReplyThinkingBlock,
    ReplyToolUseBlock,
    StopReason,
    Usage,
)
from fastengine.entrypoints.arrival import arrived, checked_body
from fastengine.entrypoints.event_json import event_json
from fastengine.entrypoints.openai.chat_job import ChatJob, ChatReader, prepare_chat
from fastengine.entrypoints.openai.chat_prompt import chat_prompt
from fastengine.entrypoints.openai.endpoint import raise_error
from fastengine.entrypoints.openai.generation import check_model
from fastengine.entrypoints.openai.refused_fields import Refused, refused_by
from fastengine.entrypoints.renamed_fields import renamed_fields
from fastengine.entrypoints.responses import EventStream, EventWriter, JsonReply
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import SequenceText, TextStream, TextUpdate
from fastengine.text.deltas import Delta

# Field -> the values that ask for nothing, next to null.
OTHERS: Refused = {
    "cache_control": ({"type": "ephemeral"},),
    "container": (),
    "context_management": ({},),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
REFUSED = refused_by(MessagesBody, OTHERS)
# Nothing is run for a count: how and for whom can't be said.
REFUSED_BY_COUNT = refused_by(
    CountTokensBody, {**OTHERS, "cache_salt": (), "priority": (), "request_id": (), "stop_sequences": ([],), "timeout_s": ()}
)


class MessagesEndpoint:
    def __init__(self, front: FrontEnd):
        self._front = front

    async def create(self, request: Request) -> Response:
        front = self._front
        new = await arrived(front, request, MessagesBody, REFUSED, "msg")
        text = await front.text.ready()
        chat = chat_request(new.body)
        with renamed_fields(rename):
            job = await prepare_chat(front.text, text, chat, request_id=new.request_id, model=new.model)
        headers = {"Request-Id": new.request_id, **new.headers}
        if new.body.stream:
            return EventStream(lambda receive, writer: self._stream(job, text, receive, writer), request_id=new.request_id, headers=headers)
        with renamed_fields(rename):
            async with job.run(front.manager, text, request.receive) as stream:
                return JsonReply(await self._answer(job, stream), headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        front = self._front
        parsed = await checked_body(front, request, CountTokensBody, REFUSED_BY_COUNT)
        check_model(parsed.value.model, front.served_names)
        text = await front.text.ready()
        chat = chat_request(parsed.value)
        with renamed_fields(rename):
            _, prompt = await chat_prompt(front.text, text, chat, with_tools=chat.tool_choice != "none")
        return JsonReply(CountTokensReply(input_tokens=len(prompt.token_ids)), headers=parsed.warning_headers())

    async def _answer(self, job: ChatJob, stream: TextStream) -> MessageReply:
        reader, blocks = ChatReader(job, stream, whole=True), Blocks()
        message = message_reply(job, stream.sequences[0])
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates, job.grammar_param)
            for update in updates:
                blocks.add(reader.deltas(update))
                message.stop_reason, message.stop_sequence = stop_reason(reader, update)
        message.content = blocks.whole()
        message.usage = usage(job, stream.sequences[0])
        return message

    async def _stream(self, job: ChatJob, text: ModelText, receive: Receive, writer: EventWriter) -> None:
        with renamed_fields(rename):
            async with job.run(self._front.manager, text, receive) as stream:
                events = MessageEvents(job, stream)
                while not stream.finished:
                    updates = await stream.updates()
                    raise_error(updates, job.grammar_param)
                    parts = [part for update in updates for part in events.of(update)]
                    if parts:
                        await writer.write(b"".join(parts), last=stream.finished)


def usage(job: ChatJob, sequence: SequenceText) -> Usage:
    cached = sequence.num_cached_tokens
    return Usage(input_tokens=len(job.prompts[0].token_ids) - cached, output_tokens=sequence.num_output_tokens, cache_read_input_tokens=cached)


def message_reply(job: ChatJob, sequence: SequenceText) -> MessageReply:
    return MessageReply(id=job.request_id, model=job.model, content=[], usage=usage(job, sequence))


def stop_reason(reader: ChatReader, update: TextUpdate) -> tuple[StopReason | None, str | None]:
    """(why the message ended, the stop sequence that ended it)."""
    reason = reader.finish_reason(update)
    if reason is None:
        return None, None
    if reason == "stop":
        return ("stop_sequence", update.stop_reason) if isinstance(update.stop_reason, str) else ("end_turn", None)
    if reason == "tool_calls":
        return "tool_use", None
    # An operator's abort has no word of its own in this API. Every client knows this one, takes the text for cut short,
    # and neither runs its last tool call nor asks for the rest by itself.
    return "max_tokens", None


@dataclass
class OpenBlock:
    """A content block while it grows; ``parts`` are its text, or its tool call's arguments."""

    first: Delta
    parts: list[str] = field(default_factory=list)


class Blocks:
    """Deltas gathered into content blocks."""

    def __init__(self) -> None:
        self._blocks: list[OpenBlock] = []

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if not self._blocks or begins_block(delta, self._blocks[-1].first):
                self._blocks.append(OpenBlock(delta))
            self._blocks[-1].parts.append(delta.text)

    def whole(self) -> list[ReplyBlock]:
        return [_whole(block.first, "".join(block.parts)) for block in self._blocks]


def begins_block(delta: Delta, open_block: Delta) -> bool:
    return delta.name is not None or delta.kind != open_block.kind or delta.call_index != open_block.call_index


def _whole(first: Delta, text: str) -> ReplyBlock:
    if first.kind == "content":
        return ReplyTextBlock(text=text)
    if first.kind == "reasoning":
        return ReplyThinkingBlock(thinking=text)
    assert first.call_id is not None
    assert first.name is not None
    return ReplyToolUseBlock(id=first.call_id, name=first.name, input=_arguments(text))


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; none for those that ``max_tokens`` or an abort cut off in the middle."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessageEvents:
    """Turns updates into the events of one stream."""

    def __init__(self, job: ChatJob, stream: TextStream):
        self._job = job
        self._sequence = stream.sequences[0]
        self._reader = ChatReader(job, stream)
        self._begun = False
        self._open: Delta | None = None
        self._num_blocks = 0

    def of(self, update: TextUpdate) -> list[bytes]:
        events = [] if self._begun else self._begin()
        for delta in self._reader.deltas(update):
            if self._open is None or begins_block(delta, self._open):
                events += self._end_block()
                events += self._begin_block(delta)
            if delta.text:
                events.append(event("content_block_delta", {"index": self._num_blocks - 1, "delta": _delta(delta)}))
        if update.finish_reason is not None:
            events += self._end_block()
            reason, sequence = stop_reason(self._reader, update)
            delta_fields = {"stop_reason": reason, "stop_sequence": sequence}
            events.append(event("message_delta", {"delta": delta_fields, "usage": usage(self._job, self._sequence)}))
            events.append(event("message_stop", {}))
        return events

    def _begin(self) -> list[bytes]:
        self._begun = True
        return [event("message_start", {"message": message_reply(self._job, self._sequence)}), event("ping", {})]

    def _begin_block(self, delta: Delta) -> list[bytes]:
        self._open = delta
        self._num_blocks += 1
        return [event("content_block_start", {"index": self._num_blocks - 1, "content_block": _whole(delta, "")})]

    def _end_block(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [event("content_block_stop", {"index": self._num_blocks - 1})]


def _delta(delta: Delta) -> dict[str, str]:
    if delta.kind == "content":
        return {"type": "text_delta", "text": delta.text}
    if delta.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "input_json_delta", "partial_json": delta.text}


def event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), event_json({"type": name, **fields}))
