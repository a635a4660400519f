"""The desk where one API process asks another to cancel a response."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fastengine.entrypoints.openai import responses_cancel
from fastengine.entrypoints.openai.responses_cancel import CancelDesk
from fastengine.frontend.errors import ApiError
from fastengine.ipc.runtime_dir import RuntimeDir


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeDir:
    return RuntimeDir(tmp_path, lock_fd=-1)


async def ask(runtime: RuntimeDir, cancelled: list[str], hangs: bool = False) -> None:
    async def cancel(response_id: str) -> None:
        cancelled.append(response_id)
        if hangs:
            await asyncio.Event().wait()

    await CancelDesk(runtime, 1, cancel).open()
    await CancelDesk(runtime, 0, cancel).ask(1, "resp_1")


def test_the_process_is_asked_by_the_id(runtime: RuntimeDir) -> None:
    cancelled: list[str] = []
    asyncio.run(ask(runtime, cancelled))
    assert cancelled == ["resp_1"]


def test_a_process_that_does_not_answer_is_a_504(runtime: RuntimeDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_cancel, "TIMEOUT_S", 0.05)
    with pytest.raises(ApiError) as caught:
        asyncio.run(ask(runtime, [], hangs=True))
    assert (caught.value.status, caught.value.param) == (504, "response_id")


def test_a_process_that_is_gone_works_on_nothing(runtime: RuntimeDir) -> None:
    async def never(response_id: str) -> None:
        raise AssertionError(response_id)

    asyncio.run(CancelDesk(runtime, 0, never).ask(1, "resp_1"))
