"""Templates of requests wait for one another only so long, and those that were rendered before not for new ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastengine.frontend import template_renders
from fastengine.frontend.errors import ApiError
from fastengine.frontend.template_renders import TemplateRenders
from fastengine.text.chat_template import ChatTemplateError, ChatTemplateOverLimit
from tests.entrypoints.bodies import HI

BOMB = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def refused(waiting: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        await waiting
    assert (error.value.status, error.value.param) == (429, "chat_template")
    assert error.value.retry_after_s
    return error.value


def test_waiting_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        renders, begun, gate = TemplateRenders(), threading.Event(), threading.Event()
        monkeypatch.setattr(template_renders, "MAX_WAITING", 1)
        monkeypatch.setattr(template_renders, "MAX_WAIT_S", 0.05)
        running = asyncio.create_task(renders.render("first", lambda: str((begun.set(), gate.wait(10))[1])))  # type: ignore[func-returns-value]
        assert await asyncio.to_thread(begun.wait, 10)
        second = asyncio.create_task(renders.render("second", lambda: "never"))
        await asyncio.sleep(0)
        assert "1 requests" in (await refused(renders.render("third", lambda: "never"))).message
        assert "0.05 s" in (await refused(second)).message
        gate.set()
        assert await running == "True"
        assert await renders.render("second", lambda: "its turn") == "its turn"
        renders.close()

    asyncio.run(test())


def test_a_known_template_waits_for_no_new_one_until_it_goes_over_its_limits() -> None:
    async def test() -> None:
        renders, gate = TemplateRenders(), threading.Event()
        assert await renders.render("good", lambda: "a") == "a"
        running = asyncio.create_task(renders.render("new", lambda: str(gate.wait(10))))
        await asyncio.sleep(0)
        assert await renders.render("good", lambda: "b") == "b"

        def fail(error: Exception) -> str:
            raise error

        with pytest.raises(ChatTemplateError):
            await renders.render("good", lambda: fail(ChatTemplateError("it refuses these messages")))
        assert await renders.render("good", lambda: "c") == "c"
        with pytest.raises(ChatTemplateOverLimit):
            await renders.render("good", lambda: fail(ChatTemplateOverLimit("too long")))
        again = asyncio.create_task(renders.render("good", lambda: "d"))
        await asyncio.sleep(0.01)
        assert not again.done()  # it stands behind the new one now
        gate.set()
        assert await again == "d"
        await running
        renders.close()

    asyncio.run(test())


def test_bombs_harm_neither_ordinary_requests_nor_known_templates(start_server: Any) -> None:
    server = start_server()
    own = {"messages": HI, "max_tokens": 1, "chat_template": "{{ messages[0].content }}"}
    assert server.http.post("/v1/chat/completions", json=own).status_code == 200
    with ThreadPoolExecutor(2) as pool:
        bombs = [pool.submit(server.http.post, "/v1/chat/completions", json={**own, "chat_template": BOMB + str(i)}) for i in range(2)]
        for body in (own, {"messages": HI, "max_tokens": 1}):
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert not all(bomb.done() for bomb in bombs)
        replies = [bomb.result() for bomb in bombs]
    # On a busy machine the last one may have had to wait too long for the first, and each may be out of time before it is over the limit.
    assert {reply.status_code for reply in replies} - {429} == {400}
    for error in (reply.json()["error"] for reply in replies):
        assert error["param"] == "chat_template"
        assert any(reason in error["message"] for reason in ("over the limit", "other requests", "took longer than"))
