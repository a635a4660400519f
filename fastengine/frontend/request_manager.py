"""RequestManager: who waits for which tokens in this API process.

::

    engine --OutputBatch--> RequestManager --(by handle)--> RequestRecord --(merged)--> GenerationStream.updates()

A record holds at most one :class:`SequenceUpdate` that nobody has read yet; what comes meanwhile is
merged into it. A slow reader so sees fewer, longer updates, loses nothing, and holds up nobody.

Most news are nothing but text for a reader that waits for it. Waking its task costs more than all it does with
them: a :data:`PlainTaker` does that for the stream, at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

import msgspec

from fastengine.frontend.engine_client import EngineClient
from fastengine.frontend.errors import ApiError, engine_unavailable
from fastengine.frontend.evidence import RequestHistory, SentRequest
from fastengine.frontend.load_board import LoadBoard
from fastengine.frontend.request_traces import RequestTrace, RequestTraces
from fastengine.protocol.outputs import (
    DUPLICATE_ID,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    EngineError,
    EngineStatus,
    FinishReason,
    OutputBatch,
    TokenOutput,
    TopLogprobs,
)
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from fastengine.protocol.tokens import unpack_columns

logger = logging.getLogger(__name__)
NOBODY_CAN_RESUME = "the server is shutting down while it is paused: nobody can resume it any more"
# The engine itself ends a request at its timeout; past this much more it counts as stuck.
DEADLINE_GRACE_S = 10.0
# Takes the tokens of the sequence of that index if it can use them now; False, and nothing done, if not.
PlainTaker = Callable[[int, list[int]], bool]


class SequenceUpdate(msgspec.Struct, kw_only=True):
    """What one sequence gained since its reader last looked (mutable: later news are merged in)."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TopLogprobs] = []
    prompt_logprobs: list[TopLogprobs | None] | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    weight_version: str | None = None
    error: EngineError | None = None
    embedding: bytes | None = None

    def merge(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.num_prompt_tokens is not None:
            self.num_prompt_tokens = output.num_prompt_tokens
        if output.embedding is not None:
            self.embedding = output.embedding
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_token_id = output.stop_token_id
            self.weight_version = output.weight_version
            self.error = output.error


class RequestRecord:
    """One sequence that the engine works on for a stream of this process."""

    __slots__ = ("handle", "index", "pending", "request_id", "sent", "stream")

    def __init__(self, stream: GenerationStream, request_id: str, handle: int, index: int, sent: SentRequest | None):
        """``sent``: for the report of a crash, if one is wanted."""
        self.stream = stream
        self.request_id = request_id
        self.handle = handle
        self.index = index
        self.pending: SequenceUpdate | None = None
        self.sent = sent


class SequenceInput(msgspec.Struct, frozen=True):
    """One sequence to generate: its packed prompt (int32 little-endian bytes) and how to sample it."""

    prompt_token_ids: bytes
    sampling: SamplingParams


class GenerationStream:
    """The sequences of one client request, as an async context manager.

    Entering it sends the requests; leaving it in any way sends one abort for what still runs.
    """

    def __init__(self, manager: RequestManager, request_id: str, requests: list[GenerateRequest], trace: RequestTrace | None = None):
        self.request_id = request_id
        self._manager = manager
        self._requests = requests
        self._trace = trace
        self._live: dict[int, RequestRecord] = {}  # by index
        self._changed: list[RequestRecord] = []
        self._plain_taker: PlainTaker | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Exception | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        """Nothing is to come: every sequence ended and its last update was read."""
        return not self._live and not self._changed

    async def __aenter__(self) -> GenerationStream:
        try:
            self._manager._begin(self, self._requests)
        except ApiError as error:
            if self._trace is not None:
                self._trace.submitted(str(error))
            raise
        if self._trace is not None:
            self._trace.submitted()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._manager._end(self)
        if self._trace is not None:
            self._trace.ended(None if error is None else f"{type(error).__name__}: {error}")

    async def updates(self) -> list[SequenceUpdate]:
        """Wait for news and take all of it: one update per sequence that has any.

        Raises the exception given to :meth:`interrupt`. A sequence that ended with an error has it in
        its update; the others go on.
        """
        while not self._changed:
            if self._interruption is not None:
                raise self._interruption
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._interruption is not None:
            raise self._interruption
        updates = []
        for record in self._changed:
            assert record.pending is not None  # a record stands in _changed exactly while it has news
            updates.append(record.pending)
            record.pending = None
        self._changed.clear()
        return updates

    def take_plainly(self, taker: PlainTaker) -> None:
        """Let ``taker`` have tokens that come with nothing else while the reader waits in :meth:`updates`, which tells of them no more.

        What it raises is raised there.
        """
        self._plain_taker = taker

    def drop(self, index: int) -> None:
        """The reader wants no more of this sequence (a stop string was found): abort it if it runs."""
        record = self._live.pop(index, None)
        if record is not None:
            if record.pending is not None:
                record.pending = None
                self._changed.remove(record)
            self._manager._drop([record], FINISH_STOP)
            self._ended_one()

    def interrupt(self, reason: Exception) -> None:
        """Make the reader's next :meth:`updates` raise ``reason``; the first reason counts."""
        if self._interruption is None:
            self._interruption = reason
            self._wake()

    def _ended_one(self) -> None:
        if self._trace is not None and not self._live:
            self._trace.answered()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _notify(self, record: RequestRecord) -> None:
        self._changed.append(record)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestManager:
    """All requests of this API process. Owns the tables by handle and by request id.

    Runs on one event loop; nothing here blocks or is thread-safe.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        default_timeout_s: float,
        reject_while_paused: bool = False,
        traces: RequestTraces | None = None,
        history: RequestHistory | None = None,
        board: LoadBoard | None = None,
    ):
        """``traces`` None: nobody looks at spans, and none are made; ``history`` None: nobody wants reports of crashes; ``board``
        None: nobody asks what is open."""
        self._engine = engine
        self._history = history
        self._board = board
        self._traces = traces
        self._default_timeout_s = default_timeout_s
        self._reject_while_paused = reject_while_paused
        self._records: dict[int, RequestRecord] = {}
        self._streams: dict[str, GenerationStream] = {}  # by the client's request id
        self._ids: set[str] = set()  # of live sequences
        self._handles = itertools.count(1)
        self._is_shutting_down = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_sequences(self) -> int:
        return len(self._records)

    def generate(
        self,
        request_id: str,
        sequences: Sequence[SequenceInput],
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> GenerationStream:
        """A stream to enter with ``async with``.

        Several sequences get the ids ``f"{request_id}#{i}"`` and share ``request_id`` as their parent.
        Entering raises ApiError 409 for an id that is live, 503 when the engine takes no requests.
        """
        single = len(sequences) == 1
        now_s = time.time()
        trace = None if self._traces is None else self._traces.begin(request_id)
        requests = [
            GenerateRequest(
                request_id=request_id if single else f"{request_id}#{i}",
                client_index=self._engine.client_index,
                handle=next(self._handles),
                prompt_token_ids=sequence.prompt_token_ids,
                sampling=sequence.sampling,
                parent_id=None if single else request_id,
                index=i,
                arrival_time_s=now_s,
                priority=priority,
                timeout_s=timeout_s if timeout_s is not None else self._default_timeout_s,
                cache_salt=cache_salt,
                trace_parent="" if trace is None else trace.trace_parent,
            )
            for i, sequence in enumerate(sequences)
        ]
        return GenerationStream(self, request_id, requests, trace)

    def check_accepting(self) -> None:
        """Raise ApiError 503 when a new request could not run. Cheap: called before any other work."""
        status = self._engine.status
        if status.state == "failed":
            raise engine_unavailable(f"the engine has failed: {status.message}", retry_after_s=10)
        if status.state == "starting":
            raise engine_unavailable(f"the engine is starting: {status.message or 'its process has just begun'}", retry_after_s=2)
        if status.state == "stopping":
            raise engine_unavailable("the engine is shutting down", retry_after_s=10)
        if self._can_not_be_resumed(status):
            raise engine_unavailable(NOBODY_CAN_RESUME, retry_after_s=10)
        if self._reject_while_paused and (status.paused or status.sleeping):
            raise engine_unavailable("the engine is paused", retry_after_s=1)

    def begin_shutdown(self) -> None:
        """No command comes any more. Requests that a pause keeps from going on need not be waited for: they end at once."""
        self._is_shutting_down = True
        self._end_if_paused(self._engine.status)

    def _can_not_be_resumed(self, status: EngineStatus) -> bool:
        return self._is_shutting_down and status.needs_operator

    def _end_if_paused(self, status: EngineStatus) -> None:
        if self._can_not_be_resumed(status) and self._streams:
            logger.warning("%d requests are ended: %s", len(self._streams), NOBODY_CAN_RESUME)
            self.end_all(engine_unavailable(NOBODY_CAN_RESUME, retry_after_s=10))

    def end_all(self, reason: ApiError) -> int:
        """Make every stream's reader raise ``reason``; how many there were."""
        for stream in list(self._streams.values()):
            stream.interrupt(reason)
        return len(self._streams)

    # -- called by the streams ----------------------------------------------------------------

    def _begin(self, stream: GenerationStream, requests: list[GenerateRequest]) -> None:
        self.check_accepting()
        ids = [request.request_id for request in requests]
        for request_id in (stream.request_id, *ids):
            if request_id in self._streams or request_id in self._ids:
                message = f"request_id: a request with id {request_id!r} is still running"
                raise ApiError(409, message, param="request_id", code=DUPLICATE_ID)
        self._streams[stream.request_id] = stream
        self._ids.update(ids)
        for request in requests:
            sent = None if self._history is None else self._history.sent(request)
            record = RequestRecord(stream, request.request_id, request.handle, request.index, sent)
            stream._live[request.index] = record
            self._records[request.handle] = record
        timeout_s = requests[0].timeout_s
        self._show_load()
        if timeout_s is not None:
            reason = ApiError(504, f"the engine gave no answer within the request's timeout of {timeout_s:g} s")
            stream._deadline = asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, stream.interrupt, reason)
        try:
            self._engine.submit(requests)
        except ApiError:
            self._end(stream)
            raise

    def _end(self, stream: GenerationStream) -> None:
        if stream._deadline is not None:
            stream._deadline.cancel()
        self._streams.pop(stream.request_id, None)
        records = list(stream._live.values())
        stream._live.clear()
        if records:
            cause = stream._interruption
            failed = EngineError(cause.status, cause.message) if isinstance(cause, ApiError) else None
            self._drop(records, error=failed)
        self._show_load()

    def _drop(self, records: list[RequestRecord], reason: Literal["abort", "stop"] = FINISH_ABORT, error: EngineError | None = None) -> None:
        self._engine.abort([record.handle for record in records], reason)
        for record in records:
            if record.sent is not None:
                self._remember(record.sent, reason if error is None else FINISH_ERROR, error)
            self._forget(record)

    def _remember(self, sent: SentRequest, reason: FinishReason, error: EngineError | None = None) -> None:
        assert self._history is not None  # it has made ``sent``
        self._history.ended(sent, reason, error)

    def _forget(self, record: RequestRecord) -> None:
        del self._records[record.handle]
        self._ids.discard(record.request_id)
        self._show_load()

    def _show_load(self) -> None:
        if self._board is not None:
            self._board.show(streams=self.num_streams, sequences=self.num_sequences)

    # -- called by the engine client ----------------------------------------------------------

    def on_outputs(self, batch: OutputBatch) -> None:
        """Put the tokens of a step, or of a few, into the records' mailboxes and wake their readers."""
        records = self._records
        for handle, token_ids in unpack_columns(batch.handles, batch.token_ids, batch.num_steps):
            record = records.get(handle)
            if record is None:
                continue  # aborted here, the engine does not know yet
            if record.sent is not None:
                record.sent.token_ids += token_ids
            pending = record.pending
            if pending is None:
                stream = record.stream
                taker, waiter = stream._plain_taker, stream._waiter
                # Only a reader that waits has nothing left to do that comes before.
                if taker is not None and waiter is not None and not waiter.done():
                    try:
                        if taker(record.index, token_ids):
                            continue
                    except Exception as error:  # noqa: BLE001 - the reader's: other streams have nothing to do with it
                        stream.interrupt(error)
                        continue
                record.pending = SequenceUpdate(index=record.index, token_ids=token_ids)
                stream._notify(record)
            else:
                pending.token_ids += token_ids
        for output in batch.details:
            record = records.get(output.handle)
            if record is not None:
                self._take_detail(record, output)

    def _take_detail(self, record: RequestRecord, output: TokenOutput) -> None:
        stream = record.stream
        if record.pending is None:
            record.pending = SequenceUpdate(index=record.index, token_ids=[])
            stream._notify(record)
        record.pending.merge(output)
        if record.sent is not None:
            record.sent.take(output)
        if output.finish_reason is not None:
            del stream._live[record.index]
            if record.sent is not None:
                self._remember(record.sent, output.finish_reason, output.error)
            self._forget(record)
            stream._ended_one()

    def on_status(self, before: EngineStatus, now: EngineStatus) -> None:
        """End every request when the engine that had them is gone, or is paused for good.

        ``failed`` says so; ``starting`` after another state is a new engine, which knows none of them.
        """
        self._end_if_paused(now)
        lost = now.state == "failed" or (now.state == "starting" and before.state != "starting")
        if not lost:
            return
        if self._history is not None and before.state != "failed" and not now.has_report:
            unfinished = [record.sent for record in self._records.values() if record.sent is not None]
            self._history.engine_died(now.message or "it was started again", unfinished, before.weight_version)
        message = f"the engine has failed: {now.message}" if now.state == "failed" else "the engine was started again"
        for stream in list(self._streams.values()):
            stream.interrupt(engine_unavailable(message))
