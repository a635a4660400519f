"""One response from its job to its end: read by a reply, a stream of events, or a task in the background."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastengine.entrypoints.openai.chat_job import ChatJob, ChatReader
from fastengine.entrypoints.openai.endpoint import raise_error
from fastengine.entrypoints.openai.logprobs import chat_logprobs
from fastengine.entrypoints.openai.request_types import ChatMessage
from fastengine.entrypoints.openai.response_types import TokenLogprob
from fastengine.entrypoints.openai.responses_input import output_messages, rename
from fastengine.entrypoints.openai.responses_output import EventNumbers, Fields, OutputItems
from fastengine.entrypoints.openai.responses_types import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ReasoningConfig,
    ReasoningItem,
    ResponseFailure,
    ResponseObject,
    ResponsesBody,
    ResponsesUsage,
    TextConfig,
    TextFormat,
)
from fastengine.entrypoints.renamed_fields import renamed_fields
from fastengine.entrypoints.responses import EventWriter
from fastengine.frontend.errors import ApiError, ClientDisconnected
from fastengine.frontend.text_service import ModelText, TextService
from fastengine.frontend.text_stream import TextStream, TextUpdate

logger = logging.getLogger(__name__)
# OpenAI's codes for a response's error, by the status that a reply would have had.
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class ResponseJob:
    """``history`` is the conversation before the answer, without instructions. ``id`` is the response's, ``chat.request_id`` the engine's."""

    id: str
    chat: ChatJob
    body: ResponsesBody
    input_items: list[Item]
    history: list[ChatMessage]
    stored: bool


def new_response(job: ResponseJob) -> ResponseObject:
    body, sampling = job.body, job.chat.sampling
    return ResponseObject(
        id=job.id,
        created_at=job.chat.created,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=job.chat.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningConfig(),
        store=job.stored,
        temperature=sampling.temperature,
        text=TextConfig(format=(body.text.format if body.text is not None else None) or TextFormat()),
        tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
    )


class ResponseCancelled(Exception):
    """The client has asked for the response's end."""


class ResponseRun:
    """Reads the stream of a job's one sequence and keeps :attr:`response` up to date."""

    def __init__(self, job: ResponseJob, text: ModelText, service: TextService, stream: TextStream, *, whole: bool = False):
        """``whole``: nobody sees it grow."""
        self.response = new_response(job)
        self._job = job
        self._text = text
        self._service = service
        self._stream = stream
        self._reader = ChatReader(job.chat, stream, whole=whole)
        self._items = OutputItems()
        self._reason: str | None = None

    async def to_end(self) -> None:
        """Raises ApiError when the request failed."""
        try:
            while not self._stream.finished:
                updates = await self._stream.updates()
                for update in updates:
                    exhaust(self._take(update))
                self._raise_error(updates)
        except ResponseCancelled:
            exhaust(self._cut_off())
        await self._finish()

    async def to_any_end(self) -> None:
        """The same for a response whose failure, too, is only seen in it."""
        try:
            await self.to_end()
        except Exception as error:  # noqa: BLE001 - told to whoever fetches the response
            exhaust(self._cut_off())
            await self._fail(error)

    async def write_events(self, writer: EventWriter) -> None:
        """:meth:`to_end`, told as events. Nothing is written before the first update; what fails after it is a last event."""
        numbers = EventNumbers()
        try:
            while not self._stream.finished:
                updates = await self._stream.updates()
                events = []
                if updates and not writer.started:
                    self._raise_error(updates)
                    events += [numbers.of_response(kind, self.response) for kind in ("created", "in_progress")]
                events += [numbers.event(kind, fields) for update in updates for kind, fields in self._take(update)]
                if events:
                    await writer.write(b"".join(events))
                self._raise_error(updates)
            await self._finish()
        except Exception as error:
            if not writer.started or isinstance(error, ClientDisconnected):
                raise
            await writer.write(b"".join([numbers.event(kind, fields) for kind, fields in self._cut_off()]))
            await self._fail(error)
        # OpenAI has no event for a response that was cancelled: it is one that has not been completed.
        outcome = "incomplete" if self.response.status == "cancelled" else self.response.status
        await writer.write(numbers.of_response(outcome, self.response))

    def cancel(self) -> None:
        """Make :meth:`to_end` come to an end, with what has been said so far."""
        self._stream.interrupt(ResponseCancelled())

    async def abandon(self) -> None:
        """The client of :meth:`write_events` has gone away: the response is what it has got."""
        exhaust(self._cut_off())
        await self._finish()

    def history(self) -> list[ChatMessage]:
        return [*self._job.history, *output_messages(self.response.output)]

    def _raise_error(self, updates: list[TextUpdate]) -> None:
        with renamed_fields(rename):
            raise_error(updates, self._job.chat.grammar_param)

    def _take(self, update: TextUpdate) -> Iterator[tuple[str, Fields]]:
        logprobs: list[TokenLogprob] = []
        if update.logprobs:
            logprobs = chat_logprobs(update.token_ids, update.logprobs, self._text.tokenizer)
        yield from self._items.add(self._reader.deltas(update), logprobs)
        if update.finish_reason is not None:
            self._reason = update.finish_reason
            yield from self._items.close("completed" if update.finish_reason == "stop" else "incomplete")

    def _cut_off(self) -> Iterator[tuple[str, Fields]]:
        """The answer ends here, unless it has ended by itself."""
        if self._reason is None:
            yield from self._take(self._stream.sequences[0].cut_off())

    async def _finish(self) -> None:
        response = self.response
        response.output = self._items.items
        response.usage = await self._usage()
        if self._reason == "stop":
            response.status, response.completed_at = "completed", int(time.time())
        elif self._reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails()
        else:
            response.status = "cancelled"

    async def _fail(self, error: Exception) -> None:
        if not isinstance(error, ApiError):
            logger.error("%s: failed in the middle", self._job.id, exc_info=error)
            error = ApiError(500, f"internal error in request {self._job.chat.request_id}")
        response = self.response
        response.output = self._items.items
        response.status = "failed"
        response.error = ResponseFailure(code=FAILURE_CODES.get(error.status, "server_error"), message=error.message)
        with contextlib.suppress(ApiError):  # there are worse things to tell than that it can't be counted
            response.usage = await self._usage()

    async def _usage(self) -> ResponsesUsage:
        sequence = self._stream.sequences[0]
        num_input, num_reasoning = len(self._job.chat.prompts[0].token_ids), 0
        for item in self.response.output:
            if isinstance(item, ReasoningItem):
                num_reasoning += len((await self._service.encode(item.content[0].text, "plain", param="reasoning")).token_ids)
        return ResponsesUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(cached_tokens=sequence.num_cached_tokens),
            output_tokens=sequence.num_output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(num_reasoning, sequence.num_output_tokens)),
            total_tokens=num_input + sequence.num_output_tokens,
        )


def exhaust(events: Iterator[Any]) -> None:
    """Let ``events`` happen, of which nobody is told."""
    for _ in events:
        pass
