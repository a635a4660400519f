"""From an answer's deltas to the output items of a response and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastengine.entrypoints.event_json import event_json
from fastengine.entrypoints.openai.response_types import TokenLogprob
from fastengine.entrypoints.openai.responses_types import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
)
from fastengine.text.deltas import Delta

Fields = dict[str, Any]


class EventNumbers:
    """Encodes the events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, fields: Fields) -> bytes:
        data = event_json({"type": kind, "sequence_number": self._next, **fields})
        self._next += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def of_response(self, kind: str, response: ResponseObject) -> bytes:
        return self.event(f"response.{kind}", {"response": response})


class OutputItems:
    """The items of one response while they grow; at most the last of them is open.

    Every method yields (kind, fields) of the events a stream tells; who wants only the items ignores them.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: Delta | None = None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        # Of tokens whose text is still to come.
        self._unplaced: list[TokenLogprob] = []

    def add(self, deltas: list[Delta], logprobs: list[TokenLogprob]) -> Iterator[tuple[str, Fields]]:
        """Take an update's deltas and the log-probabilities of its tokens, which go to the text they end up in."""
        self._unplaced += logprobs
        for delta in deltas:
            if delta.broken:
                yield from self.close("incomplete")
                continue
            opened = self._open
            if opened is None or delta.name is not None or delta.kind != opened.kind or delta.call_index != opened.call_index:
                yield from self.close("completed")
                yield from self._begin(delta)
            if delta.text:
                yield self._grow(delta)

    def close(self, status: ItemStatus) -> Iterator[tuple[str, Fields]]:
        """The open item is whole, or ``incomplete`` for good."""
        if self._open is None:
            return
        kind, text = self._open.kind, "".join(self._parts)
        item, index = self.items[-1], len(self.items) - 1
        place = {"item_id": item.id, "output_index": index}
        self._open = None
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            yield "response.function_call_arguments.done", {**place, "name": item.name, "arguments": text}
        else:
            part: OutputText | ReasoningText
            if isinstance(item, MessageItem):
                part = OutputText(text=text, logprobs=self._logprobs)
                item.content = [part]
                yield "response.output_text.done", {**place, "content_index": 0, "text": text, "logprobs": self._logprobs}
            else:
                assert kind == "reasoning"
                part = ReasoningText(text=text)
                item.content = [part]
                yield "response.reasoning_text.done", {**place, "content_index": 0, "text": text}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _begin(self, delta: Delta) -> Iterator[tuple[str, Fields]]:
        self._open, self._parts, self._logprobs = delta, [], []
        part: OutputText | ReasoningText | None = None
        item: OutputItem
        if delta.kind == "content":
            item, part = MessageItem(id=_new_id("msg"), status="in_progress", content=[]), OutputText(text="")
        elif delta.kind == "reasoning":
            item, part = ReasoningItem(id=_new_id("rs"), status="in_progress", content=[]), ReasoningText(text="")
        else:
            assert delta.call_id is not None  # every call's first delta has both
            assert delta.name is not None
            item = FunctionCallItem(id=_new_id("fc"), status="in_progress", call_id=delta.call_id, name=delta.name, arguments="")
        self.items.append(item)
        index = len(self.items) - 1
        yield "response.output_item.added", {"output_index": index, "item": item}
        if part is not None:
            yield "response.content_part.added", {"item_id": item.id, "output_index": index, "content_index": 0, "part": part}

    def _grow(self, delta: Delta) -> tuple[str, Fields]:
        self._parts.append(delta.text)
        fields: Fields = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, "delta": delta.text}
        if delta.kind == "tool":
            return "response.function_call_arguments.delta", fields
        fields["content_index"] = 0
        if delta.kind == "reasoning":
            self._unplaced = []
            return "response.reasoning_text.delta", fields
        fields["logprobs"], self._unplaced = self._unplaced, []
        self._logprobs += fields["logprobs"]
        return "response.output_text.delta", fields


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
