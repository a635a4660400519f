"""The frame of a generating endpoint: body in, job, and the reply whole or as a stream."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fastengine.entrypoints.arrival import arrived
from fastengine.entrypoints.openai.generation import Job
from fastengine.entrypoints.openai.refused_fields import Refused
from fastengine.entrypoints.openai.request_types import GenerationFields
from fastengine.entrypoints.openai.sampling import check_stream_options
from fastengine.entrypoints.responses import EventStream, EventWriter, JsonReply
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import TextStream, TextUpdate
from fastengine.protocol.outputs import INVALID_GRAMMAR

T = TypeVar("T", bound=GenerationFields)
J = TypeVar("J", bound=Job)


class GeneratingEndpoint(abc.ABC, Generic[T, J]):
    """One POST route that generates. Subclasses say what the body is and what the reply looks like."""

    body_type: type[T]
    refused: ClassVar[Refused]
    id_prefix: ClassVar[str]

    def __init__(self, front: FrontEnd):
        self._front = front

    @abc.abstractmethod
    async def prepare(self, body: T, request_id: str, model: str, text: ModelText) -> J:
        """Check what needs the model and turn prompts into token ids. Raises ApiError."""

    @abc.abstractmethod
    async def answer(self, job: J, text: ModelText, stream: TextStream) -> Any:
        """Read ``stream`` to its end and return the whole reply."""

    @abc.abstractmethod
    async def stream(self, job: J, text: ModelText, stream: TextStream, writer: EventWriter) -> None:
        """Write ``stream`` as events, up to and with ``[DONE]``. Nothing is written before the first update."""

    async def handle(self, request: Request) -> Response:
        front = self._front
        new = await arrived(front, request, self.body_type, self.refused, self.id_prefix)
        check_stream_options(new.body)
        text = await front.text.ready()
        job = await self.prepare(new.body, new.request_id, new.model, text)
        if new.body.stream:
            return EventStream(lambda receive, writer: self._stream(job, text, receive, writer), request_id=new.request_id, headers=new.headers)
        async with job.run(front.manager, text, request.receive) as stream:
            return JsonReply(await self.answer(job, text, stream), headers=new.headers)

    async def _stream(self, job: J, text: ModelText, receive: Receive, writer: EventWriter) -> None:
        async with job.run(self._front.manager, text, receive) as stream:
            await self.stream(job, text, stream, writer)


def raise_error(updates: list[TextUpdate], grammar_param: str | None = None) -> None:
    """Raise the first sequence's error as ApiError: it ends the whole client request.

    ``grammar_param`` is the request's field that brought its grammar, if it has one.
    """
    for update in updates:
        if update.error is not None:
            error = ApiError.from_engine(update.error)
            if error.code == INVALID_GRAMMAR and grammar_param is not None:
                raise bad_request(grammar_param, error.message, code=INVALID_GRAMMAR)
            raise error
        if update.finish_reason == "error":
            raise ApiError(500, "the engine ended this request with an error")
