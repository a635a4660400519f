"""The Responses API: create, fetch, cancel and delete responses, and list their input."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from fastengine.entrypoints.arrival import Arrival, arrived
from fastengine.entrypoints.openai.chat_job import prepare_chat
from fastengine.entrypoints.openai.refused_fields import Refused, refused_by
from fastengine.entrypoints.openai.request_types import ChatMessage
from fastengine.entrypoints.openai.responses_cancel import CancelDesk
from fastengine.entrypoints.openai.responses_input import chat_request, input_items, input_messages, rename
from fastengine.entrypoints.openai.responses_run import ResponseJob, ResponseRun
from fastengine.entrypoints.openai.responses_store import ResponseStore, StoredResponse, check_storable
from fastengine.entrypoints.openai.responses_types import DeletedResponse, InputItemList, ResponseFailure, ResponseObject, ResponsesBody
from fastengine.entrypoints.renamed_fields import renamed_fields
from fastengine.entrypoints.responses import EventStream, EventWriter, JsonReply
from fastengine.frontend.errors import ApiError, ClientDisconnected, bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.text_service import ModelText
from fastengine.ipc.process import is_alive

logger = logging.getLogger(__name__)
MAX_LISTED = 100
# Field -> the values that ask for nothing, next to null.
REFUSED: Refused = refused_by(
    ResponsesBody,
    {
        "access_programs": (),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
    },
)


class ResponsesEndpoint:
    def __init__(self, front: FrontEnd):
        self._front = front
        server = front.config.server
        self._store = ResponseStore(
            front.engine.runtime_dir, max_responses=server.max_stored_responses, max_bytes=int(server.stored_responses_mib * 2**20)
        )
        # By the response's id: what this process works on in the background.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, ResponseRun] = {}
        self._desk = CancelDesk(front.engine.runtime_dir, front.engine.client_index, self._cancel_here)

    # -- POST /v1/responses -----------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        front = self._front
        response_id = f"resp_{uuid.uuid4().hex}"
        new = await arrived(front, request, ResponsesBody, REFUSED, "resp", given_id=lambda body: body.request_id or response_id)
        self._check(new.body)
        text = await front.text.ready()
        job = await self._prepare(new, response_id, text)
        if new.body.stream:
            return EventStream(lambda receive, writer: self._stream(job, text, receive, writer), request_id=new.request_id, headers=new.headers)
        if new.body.background:
            return JsonReply(await self._start_in_background(job, text), headers=new.headers)
        async with job.chat.run(front.manager, text, request.receive) as stream:
            run = ResponseRun(job, text, front.text, stream, whole=True)
            await run.to_end()
        await self._keep(job, run)
        return JsonReply(run.response, headers=new.headers)

    def _check(self, body: ResponsesBody) -> None:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options", "only allowed when stream is true")
        if body.previous_response_id is not None:
            check_storable(self._store, "previous_response_id")
        if body.store:
            check_storable(self._store, "store")
        if body.background:
            check_storable(self._store, "background")
            if body.stream:
                raise bad_request("background", "a response in the background can't be streamed: fetch it with GET")
            if body.store is False:
                raise bad_request("background", "needs store: the response is fetched later")

    async def _prepare(self, new: Arrival[ResponsesBody], response_id: str, text: ModelText) -> ResponseJob:
        body = new.body
        items = input_items(body.input)
        history: list[ChatMessage] = []
        if body.previous_response_id is not None:
            previous = await self._fetch(body.previous_response_id, param="previous_response_id")
            if previous.response.status not in ("completed", "incomplete"):
                raise bad_request("previous_response_id", f"that response is {previous.response.status}, it can't be continued")
            history = previous.history
        history = [*history, *input_messages(items)]
        chat = chat_request(body, history)
        with renamed_fields(rename):
            job = await prepare_chat(self._front.text, text, chat, request_id=new.request_id, model=new.model)
        return ResponseJob(response_id, job, body, items, history, stored=body.store is not False and self._store.enabled)

    async def _stream(self, job: ResponseJob, text: ModelText, receive: Receive, writer: EventWriter) -> None:
        async with job.chat.run(self._front.manager, text, receive) as stream:
            run = ResponseRun(job, text, self._front.text, stream)
            try:
                await run.write_events(writer)
            except ClientDisconnected:
                if writer.started:  # it knows the response's id, and may come back
                    await run.abandon()
                    await self._keep(job, run)
                raise
        await self._keep(job, run)

    async def _keep(self, job: ResponseJob, run: ResponseRun) -> None:
        if job.stored:
            record = StoredResponse(
                response=run.response,
                input_items=job.input_items,
                history=run.history(),
                owner=os.getpid(),
                client_index=self._front.engine.client_index,
            )
            await self._store.put(record)

    # -- in the background ------------------------------------------------------------------------

    async def _start_in_background(self, job: ResponseJob, text: ModelText) -> ResponseObject:
        """The response as it stands once the engine has the request. Raises what keeps it from getting there."""
        await self._desk.open()
        begun: asyncio.Future[ResponseObject] = asyncio.get_running_loop().create_future()
        self._tasks[job.id] = task = asyncio.create_task(self._work(job, text, begun))
        task.add_done_callback(lambda _: self._tasks.pop(job.id))
        return await asyncio.shield(begun)

    async def _work(self, job: ResponseJob, text: ModelText, begun: asyncio.Future[ResponseObject]) -> None:
        try:
            async with job.chat.run(self._front.manager, text, never) as stream:
                run = self._runs[job.id] = ResponseRun(job, text, self._front.text, stream, whole=True)
                await self._keep(job, run)
                begun.set_result(msgspec.structs.replace(run.response))
                await run.to_any_end()
            await self._keep(job, run)
        except Exception as error:
            if begun.done():
                logger.exception("%s: failed in the background", job.id)
            else:
                begun.set_exception(error)
        finally:
            self._runs.pop(job.id, None)

    async def _cancel_here(self, response_id: str) -> None:
        """Cancel a response of this process's and wait for its end; another one is none of its business."""
        run, task = self._runs.get(response_id), self._tasks.get(response_id)
        if run is not None:
            run.cancel()
        if task is not None:
            await asyncio.wait({task})

    # -- /v1/responses/{id} -----------------------------------------------------------------------

    async def get(self, request: Request) -> Response:
        refuse_query(request, ("stream", "starting_after", "include"))
        return JsonReply((await self._fetch(request.path_params["response_id"])).response)

    async def cancel(self, request: Request) -> Response:
        record = await self._fetch(request.path_params["response_id"])
        if not record.response.background:
            raise bad_request("response_id", "only a response in the background can be cancelled")
        if record.response.status == "in_progress":
            await self._desk.ask(record.client_index, record.response.id)
            record = await self._fetch(record.response.id)
        return JsonReply(record.response)

    async def delete(self, request: Request) -> Response:
        record = await self._fetch(request.path_params["response_id"])
        if record.response.status == "in_progress":
            raise ApiError(409, "response_id: this response is in progress: cancel it first", param="response_id")
        await self._store.delete(record.response.id)
        return JsonReply(DeletedResponse(id=record.response.id))

    async def input_items(self, request: Request) -> Response:
        refuse_query(request, ("include", "before"))
        items = (await self._fetch(request.path_params["response_id"])).input_items
        query = request.query_params
        limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= MAX_LISTED):
            raise bad_request("limit", f"expected a number from 1 to {MAX_LISTED}")
        if order not in ("asc", "desc"):
            raise bad_request("order", "expected asc or desc")
        if order == "desc":
            items = items[::-1]
        if after is not None:
            place = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise bad_request("after", "there is no item of this id")
            items = items[place + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return JsonReply(InputItemList(data=page, first_id=first, last_id=last, has_more=len(page) < len(items)))

    async def _fetch(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """Raises ApiError 404. What a process was working on when it died has failed."""
        try:
            record = await self._store.get(response_id)
        except ApiError as error:
            raise ApiError(error.status, f"{param}: {error.message}", param=param, code=error.code) from None
        response = record.response
        if response.status == "in_progress" and not is_alive(record.owner):
            response.status, response.error = "failed", ResponseFailure(code="server_error", message="the process that worked on it died")
        return record


def refuse_query(request: Request, names: tuple[str, ...]) -> None:
    """Raise ApiError 400 for the first of ``names`` in the query that asks for something; clients write lists as ``name[]``."""
    for key, value in request.query_params.multi_items():
        name = key.removesuffix("[]")
        if name in names and value not in ("", "false"):
            raise bad_request(name, "this parameter is not supported", code="unsupported_field")


async def never() -> Message:
    """Receives nothing: a response in the background has no client that could go away."""
    return await asyncio.get_running_loop().create_future()
