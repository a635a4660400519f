"""Mailboxes that merge, one abort per leaving, one live request per id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from fastengine.config import EngineConfig
from fastengine.frontend.errors import ApiError, ClientDisconnected
from fastengine.frontend.evidence import RequestHistory
from fastengine.frontend.request_manager import RequestManager, SequenceInput
from fastengine.observability.request_log import read_requests
from fastengine.protocol.outputs import EngineError, EngineStatus, OutputBatch, TokenOutput, TopLogprobs
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from fastengine.protocol.tokens import pack_token_ids


class RecordingEngine:
    """Stands where the EngineClient does and remembers what it was told."""

    def __init__(self) -> None:
        self.client_index = 3
        self.status = EngineStatus(state="ready")
        self.sent: list[GenerateRequest] = []
        self.aborted: list[list[int]] = []
        self.reasons: list[str] = []
        self.full = False

    def submit(self, requests: list[GenerateRequest]) -> None:
        if self.full:
            raise ApiError(503, "full")
        self.sent += requests

    def abort(self, handles: list[int], reason: str = "abort") -> None:
        self.aborted.append(handles)
        self.reasons.append(reason)


def sequences(n: int = 1) -> list[SequenceInput]:
    return [SequenceInput(pack_token_ids([1, 2, 3]), SamplingParams())] * n


def plain(*pairs: tuple[int, int]) -> OutputBatch:
    handles, token_ids = zip(*pairs, strict=True)
    return OutputBatch(1, np.array(handles, "<i8").tobytes(), np.array(token_ids, "<i4").tobytes())


def detail(handle: int, **fields: Any) -> OutputBatch:
    return OutputBatch(1, b"", b"", [TokenOutput(handle=handle, **fields)])


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def manager(engine: RecordingEngine) -> RequestManager:
    return RequestManager(engine, default_timeout_s=600.0)  # type: ignore[arg-type]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 5))


def test_a_run_is_one_update_a_sequence(engine, manager):
    async def test():
        async with manager.generate("r", sequences(2)) as stream:
            first, second = (request.handle for request in engine.sent)
            handles, tokens = np.array([first, 99, second], "<i8"), np.array([[5, 0, 6], [7, 0, 8], [9, 0, 10]], "<i4")
            manager.on_outputs(detail(second, token_ids=[4]))
            manager.on_outputs(OutputBatch(3, handles.tobytes(), tokens.tobytes(), num_steps=3))
            updates = {update.index: update.token_ids for update in await stream.updates()}
            assert updates == {0: [5, 7, 9], 1: [4, 6, 8, 10]}

    run(test())


def test_what_a_dead_engine_leaves_unsaid_is_reported_by_its_client(engine, tmp_path):
    """Finished, dropped and unfinished sequences with what they had; nothing when the engine has written its own report."""
    config = EngineConfig.from_flags(model="m", crash_dump_dir=str(tmp_path))
    history = RequestHistory.of(config, "inst", 3)
    manager = RequestManager(engine, default_timeout_s=600.0, history=history)
    ready, failed = EngineStatus(state="ready", weight_version="v"), EngineStatus(state="failed", message="killed")

    async def test():
        async with manager.generate("done", sequences()), manager.generate("left", sequences()), manager.generate("live", sequences()):
            done, _, live = (request.handle for request in engine.sent)
            manager.on_outputs(detail(done, token_ids=[7], num_cached_tokens=2))
            manager.on_outputs(plain((done, 8), (live, 9)))
            manager.on_outputs(detail(done, token_ids=[5], finish_reason="stop"))
            manager._streams["left"].drop(0)
            manager.on_status(ready, msgspec.structs.replace(failed, has_report=True))
            assert list(tmp_path.iterdir()) == []
            manager.on_status(ready, failed)
            manager.on_status(failed, EngineStatus(state="starting"))  # its successor
        manager.on_status(failed, ready)
        manager.on_status(ready, msgspec.structs.replace(failed, message="killed again"))

    run(test())
    file, later = sorted(tmp_path.iterdir())
    head = json.loads(file.read_text().splitlines()[0])
    assert (head["what"], head["reason"]) == ("engine", "killed")
    found = {r.request_id: (r.state, r.finish_reason, r.output_token_ids) for r in read_requests(file)}
    assert found == {"left": ("finished", "stop", []), "done": ("finished", "stop", [7, 8, 5]), "live": ("running", None, [9])}
    live = next(r for r in read_requests(later) if r.request_id == "live")
    assert (live.state, live.finish_reason, live.output_token_ids) == ("finished", "error", [9])
    assert live.error is not None
    assert "the engine has failed: killed" in str(live.error)


def test_unread_news_merge_into_one_update(engine, manager):
    async def test():
        async with manager.generate("a", sequences()) as stream:
            handle = engine.sent[0].handle
            manager.on_outputs(detail(handle, token_ids=[7], num_prompt_tokens=3, num_cached_tokens=2))
            for token in (8, 0, 9):
                manager.on_outputs(plain((handle, token)))
            manager.on_outputs(detail(handle, token_ids=[5], finish_reason="length", num_output_tokens=5, weight_version="v"))
            (update,) = await stream.updates()
            assert update.token_ids == [7, 8, 0, 9, 5]
            assert (update.num_prompt_tokens, update.num_cached_tokens, update.finish_reason, update.weight_version) == (3, 2, "length", "v")
            assert stream.finished
        assert engine.aborted == []
        assert manager.num_sequences == 0
        assert manager.num_streams == 0

    run(test())


def test_merging_keeps_logprobs_beside_their_tokens(engine, manager):
    async def test():
        async with manager.generate("a", sequences()) as stream:
            handle = engine.sent[0].handle
            for token in range(4):
                manager.on_outputs(detail(handle, token_ids=[token], logprobs=[TopLogprobs(-float(token), 1)]))
            (update,) = await stream.updates()
            assert [-entry.logprob for entry in update.logprobs] == update.token_ids == [0, 1, 2, 3]

    run(test())


def test_a_waiting_reader_is_woken_once_with_every_sequence_that_changed(engine, manager):
    async def test():
        async with manager.generate("p", sequences(3)) as stream:
            handles = [request.handle for request in engine.sent]
            assert [request.request_id for request in engine.sent] == ["p#0", "p#1", "p#2"]
            assert {request.parent_id for request in engine.sent} == {"p"}
            assert len(set(handles)) == 3
            reader = asyncio.create_task(stream.updates())
            await asyncio.sleep(0)
            assert not reader.done()
            manager.on_outputs(plain((handles[2], 5), (handles[0], 6)))
            assert [(u.index, u.token_ids) for u in await reader] == [(2, [5]), (0, [6])]

    run(test())


def test_a_taker_has_what_comes_plainly_while_the_reader_waits_and_nothing_else(engine, manager):
    taken: list[tuple[int, list[int]]] = []

    def take(index: int, token_ids: list[int]) -> bool:
        if 0 in token_ids:
            return False
        taken.append((index, token_ids))
        return True

    async def test():
        async with manager.generate("p", sequences(2)) as stream:
            first, second = (request.handle for request in engine.sent)
            stream.take_plainly(take)
            manager.on_outputs(plain((first, 1)))  # nobody waits yet
            assert [u.token_ids for u in await stream.updates()] == [[1]]
            reader = asyncio.create_task(stream.updates())
            await asyncio.sleep(0)
            manager.on_outputs(plain((first, 2), (second, 3)))
            manager.on_outputs(plain((second, 4)))
            await asyncio.sleep(0)
            assert not reader.done()
            assert taken == [(0, [2]), (1, [3]), (1, [4])]
            # What it refuses the reader is woken for, and nothing overtakes it.
            manager.on_outputs(plain((first, 0), (second, 5)))
            manager.on_outputs(plain((first, 6)))
            assert [(u.index, u.token_ids) for u in await reader] == [(0, [0, 6]), (1, [5])]
            reader = asyncio.create_task(stream.updates())
            await asyncio.sleep(0)
            manager.on_outputs(detail(first, token_ids=[7], finish_reason="length"))
            assert [(u.index, u.token_ids, u.finish_reason) for u in await reader] == [(0, [7], "length")]
            assert taken == [(0, [2]), (1, [3]), (1, [4])]

    run(test())


def test_what_a_taker_raises_is_raised_by_its_own_reader(engine, manager):
    def fail(index: int, token_ids: list[int]) -> bool:
        raise RuntimeError("broken")

    async def test():
        async with manager.generate("bad", sequences()) as bad, manager.generate("good", sequences()) as good:
            bad.take_plainly(fail)
            readers = [asyncio.create_task(stream.updates()) for stream in (bad, good)]
            await asyncio.sleep(0)
            manager.on_outputs(plain((engine.sent[0].handle, 1), (engine.sent[1].handle, 2)))
            assert [u.token_ids for u in await readers[1]] == [[2]]
            with pytest.raises(RuntimeError, match="broken"):
                await readers[0]

    run(test())


@pytest.mark.parametrize("leave_with", [None, RuntimeError("x"), asyncio.CancelledError()])
def test_leaving_sends_exactly_one_abort_for_what_still_runs(engine, manager, leave_with):
    async def test():
        try:
            async with manager.generate("p", sequences(3)) as stream:
                handles = [request.handle for request in engine.sent]
                manager.on_outputs(detail(handles[0], token_ids=[1], finish_reason="stop"))
                stream.drop(1)
                assert engine.aborted == [[handles[1]]]
                if leave_with is not None:
                    raise leave_with
        except (RuntimeError, asyncio.CancelledError):
            assert leave_with is not None
        assert engine.aborted == [[handles[1]], [handles[2]]]
        assert manager.num_sequences == 0
        assert manager.num_streams == 0

    run(test())


def test_outputs_that_come_after_an_abort_are_ignored(engine, manager):
    async def test():
        async with manager.generate("p", sequences(2)) as stream:
            first, second = (request.handle for request in engine.sent)
            manager.on_outputs(plain((first, 1), (second, 2)))
            stream.drop(0)
            manager.on_outputs(plain((first, 3), (second, 4)))
            assert [(u.index, u.token_ids) for u in await stream.updates()] == [(1, [2, 4])]
        manager.on_outputs(plain((first, 1), (second, 2)))

    run(test())


def test_a_live_id_is_taken_and_free_again_afterwards(engine, manager):
    async def test():
        async with manager.generate("same", sequences(2)):
            for taken in ("same", "same#1"):
                with pytest.raises(ApiError) as refused:
                    async with manager.generate(taken, sequences()):
                        pass
                assert refused.value.status == 409
                assert refused.value.param == "request_id"
        assert len(engine.sent) == 2
        assert len(engine.aborted) == 1
        async with manager.generate("same", sequences()):
            pass

    run(test())


def test_an_id_stays_taken_until_its_stream_is_left(engine, manager):
    async def test():
        async with manager.generate("same", sequences()):
            manager.on_outputs(detail(engine.sent[0].handle, token_ids=[1], finish_reason="stop"))
            with pytest.raises(ApiError):
                async with manager.generate("same", sequences()):
                    pass
        assert engine.aborted == []

    run(test())


def test_a_full_engine_socket_leaves_nothing_behind(engine, manager):
    async def test():
        engine.full = True
        with pytest.raises(ApiError):
            async with manager.generate("a", sequences(2)):
                pass
        assert manager.num_sequences == 0
        assert manager.num_streams == 0
        assert len(engine.aborted) == 1

    run(test())


def test_interrupt_reaches_a_waiting_reader_and_the_first_reason_counts(engine, manager):
    async def test():
        async with manager.generate("a", sequences()) as stream:
            reader = asyncio.create_task(stream.updates())
            await asyncio.sleep(0)
            stream.interrupt(ClientDisconnected())
            stream.interrupt(RuntimeError("late"))
            with pytest.raises(ClientDisconnected):
                await reader
        assert len(engine.aborted) == 1

    run(test())


@pytest.mark.parametrize("now", ["failed", "starting"])
def test_a_lost_engine_ends_every_request_with_503(engine, manager, now):
    async def test():
        async with manager.generate("a", sequences()) as stream:
            manager.on_status(EngineStatus(state="ready"), EngineStatus(state="recovering"))
            manager.on_outputs(plain((engine.sent[0].handle, 1)))
            assert len(await stream.updates()) == 1
            manager.on_status(EngineStatus(state="ready"), EngineStatus(state=now, message="killed"))
            with pytest.raises(ApiError) as failed:
                await stream.updates()
            assert failed.value.status == 503
            assert failed.value.retry_after_s

    run(test())


def test_a_shutdown_ends_what_only_a_resume_could_let_go_on(engine, manager, caplog):
    paused = EngineStatus(state="ready", paused=True, needs_operator=True)

    async def test():
        async with manager.generate("a", sequences()) as stream:
            manager.on_status(EngineStatus(state="ready"), paused)
            manager.on_outputs(plain((engine.sent[0].handle, 1)))
            assert len(await stream.updates()) == 1
            engine.status = EngineStatus(state="ready", paused=True)  # by a command that lets it go on
            manager.begin_shutdown()
            manager.on_outputs(plain((engine.sent[0].handle, 2)))
            assert len(await stream.updates()) == 1
            engine.status = paused
            manager.on_status(EngineStatus(state="ready", paused=True), paused)
            with pytest.raises(ApiError, match="nobody can resume it") as ended:
                await stream.updates()
            assert (ended.value.status, ended.value.retry_after_s) == (503, 10)
            with pytest.raises(ApiError, match="nobody can resume it"):
                await manager.generate("b", sequences()).__aenter__()
        assert len(engine.aborted) == 1

    run(test())
    assert "1 requests are ended" in caplog.text


def test_an_engine_that_says_nothing_past_the_deadline_is_a_504(engine, monkeypatch):
    monkeypatch.setattr("fastengine.frontend.request_manager.DEADLINE_GRACE_S", 0.01)
    manager = RequestManager(engine, default_timeout_s=600.0)

    async def test():
        async with manager.generate("a", sequences(), timeout_s=0.01) as stream:
            with pytest.raises(ApiError) as late:
                await stream.updates()
            assert late.value.status == 504

    run(test())


@pytest.mark.parametrize(("status", "accepted"), [("ready", True), ("recovering", True), ("starting", False), ("stopping", False), ("failed", False)])
def test_which_states_take_requests(engine, manager, status, accepted):
    engine.status = EngineStatus(state=status)
    if accepted:
        manager.check_accepting()
    else:
        with pytest.raises(ApiError) as refused:
            manager.check_accepting()
        assert refused.value.status == 503
        assert refused.value.retry_after_s


def test_reject_while_paused(engine):
    engine.status = EngineStatus(state="ready", paused=True)
    RequestManager(engine, default_timeout_s=1.0).check_accepting()
    with pytest.raises(ApiError):
        RequestManager(engine, default_timeout_s=1.0, reject_while_paused=True).check_accepting()


def test_errors_reach_their_own_sequence_only(engine, manager):
    async def test():
        async with manager.generate("p", sequences(2)) as stream:
            first, second = (request.handle for request in engine.sent)
            manager.on_outputs(detail(first, finish_reason="error", error=EngineError(500, "boom")))
            manager.on_outputs(plain((second, 4)))
            failed, going_on = await stream.updates()
            assert failed.error.message == "boom"
            assert going_on.error is None
            assert going_on.token_ids == [4]

    run(test())
