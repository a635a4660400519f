"""A stream's reply ends once: with its last events, or by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from fastengine.entrypoints.responses import EventWriter


def sent(writes: list[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
    """(body, whether more follows) of what is sent after the reply's start for (events, last), and closing."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        writer = EventWriter(send, {})
        for events, last in writes:
            await writer.write(events, last=last)
        await writer.close()

    asyncio.run(run())
    assert [message["type"] for message in messages] == ["http.response.start"] + ["http.response.body"] * (len(messages) - 1)
    return [(message["body"], message["more_body"]) for message in messages[1:]]


def test_the_last_events_and_the_end_are_one_piece() -> None:
    assert sent([(b"a", False), (b"b", True)]) == [(b"a", True), (b"b", False)]


def test_a_reply_of_one_piece() -> None:
    assert sent([(b"a", True)]) == [(b"a", False)]


def test_without_last_events_closing_ends_the_reply() -> None:
    assert sent([(b"a", False)]) == [(b"a", True), (b"", False)]
