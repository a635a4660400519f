"""The frame of a generating endpoint: body in, job, and the reply whole or as a stream."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fastengine.entrypoints import request_body
from fastengine.entrypoints.openai.generation import Job, check_model, new_request_id
from fastengine.entrypoints.openai.refused_fields import refuse_unsupported
from fastengine.entrypoints.openai.request_types import GenerationFields
from fastengine.entrypoints.openai.sampling import check_stream_options
from fastengine.entrypoints.responses import EventStream, EventWriter, JsonReply
from fastengine.frontend.errors import ApiError, ClientDisconnected
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import TextStream, TextUpdate

T = TypeVar("T", bound=GenerationFields)
J = TypeVar("J", bound=Job)


class GeneratingEndpoint(abc.ABC, Generic[T, J]):
    """One POST route that generates. Subclasses say what the body is and what the reply looks like."""

    body_type: type[T]
    refused: ClassVar[dict[str, tuple[Any, ...]]]
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
        front.manager.check_accepting()
        raw = request_body.decode_object(await request_body.read_body(request, front.max_body_bytes))
        refuse_unsupported(raw, self.refused)
        parsed = request_body.parse(raw, self.body_type, known_elsewhere=self.refused, strict=front.config.server.strict_fields)
        body = parsed.value
        request_id = new_request_id(self.id_prefix, body.request_id)
        request.state.request_id = request_id
        model = check_model(body.model, front.served_names)
        check_stream_options(body)
        text = await front.text.ready()
        job = await self.prepare(body, request_id, model, text)
        headers = {"X-Request-Id": request_id, **parsed.warning_headers()}
        if body.stream:
            return EventStream(lambda receive, writer: self._stream(job, text, receive, writer), request_id=request_id, headers=headers)
        try:
            async with job.run(front.manager, text, request.receive) as stream:
                return JsonReply(await self.answer(job, text, stream), headers=headers)
        except ClientDisconnected:
            return Response(status_code=499)

    async def _stream(self, job: J, text: ModelText, receive: Receive, writer: EventWriter) -> None:
        async with job.run(self._front.manager, text, receive) as stream:
            await self.stream(job, text, stream, writer)


def raise_error(updates: list[TextUpdate]) -> None:
    """Raise the first sequence's error as ApiError: it ends the whole client request."""
    for update in updates:
        if update.error is not None:
            raise ApiError.from_engine(update.error)
        if update.finish_reason == "error":
            raise ApiError(500, "the engine ended this request with an error")
