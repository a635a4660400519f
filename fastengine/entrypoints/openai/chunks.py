"""Stream chunks as bytes: what is the same in every chunk of a stream is encoded once."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from fastengine.entrypoints.event_json import event_json
from fastengine.entrypoints.openai.response_types import Usage
from fastengine.frontend.http_protocol import DirectBody
from fastengine.frontend.text_stream import SequenceText


class ChunkWriter:
    """Builds the ``data:`` events of one stream.

    ``before_text`` and ``after_text`` are the JSON around a choice's text: ``"delta":{"content":`` and
    ``}`` for chat, ``"text":`` and nothing for completions. With ``usage_field`` every chunk has a
    ``usage``, null unless given.
    """

    def __init__(self, head: dict[str, Any], *, before_text: bytes, after_text: bytes, usage_field: bool):
        self._head = b"data: " + event_json(head)[:-1]
        self._before_text = before_text
        self._after_text = after_text
        self._tail = b',"usage":null}\n\n' if usage_field else b"}\n\n"
        # Around the text of a chunk that holds nothing else, which most are.
        self._plain_tail = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._plain_heads: dict[int, bytes] = {}

    def plain(self, index: int, text: str) -> bytes:
        head = self._plain_heads.get(index)
        if head is None:
            head = self._plain_heads[index] = b'%s,"choices":[{"index":%d,%s' % (self._head, index, self._before_text)
        return head + event_json(text) + self._plain_tail

    def full(
        self,
        index: int,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        in_choice: dict[str, Any] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """A chunk with anything beside the text; ``in_choice`` are further fields of the choice."""
        parts = [self._head, b',"choices":[{"index":%d,' % index, self._before_text, event_json(text)]
        parts += (self._after_text, b',"logprobs":', event_json(logprobs), b',"finish_reason":', event_json(finish_reason))
        if finish_reason is not None:
            parts += (b',"stop_reason":', event_json(stop_reason))
        if in_choice:
            parts += (b",", event_json(in_choice)[1:-1])
        parts += (b"}]", self._tail if usage is None else self._usage_tail(usage))
        return b"".join(parts)

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """A chat chunk whose delta is given whole."""
        parts = [self._head, b',"choices":[{"index":%d,"delta":' % index, event_json(delta)]
        parts += (b',"logprobs":', event_json(logprobs), b',"finish_reason":', event_json(finish_reason))
        if finish_reason is not None:
            parts += (b',"stop_reason":', event_json(stop_reason))
        parts += (b"}]", self._tail if usage is None else self._usage_tail(usage))
        return b"".join(parts)

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage."""
        return b"".join((self._head, b',"choices":[]', self._usage_tail(usage)))

    def _usage_tail(self, usage: Usage) -> bytes:
        return b',"usage":' + event_json(usage) + b"}\n\n"


class PlainChunks:
    """Plain chunks of a stream, straight to its connection: :meth:`take` is the stream's ``PlainTaker``."""

    def __init__(self, chunks: ChunkWriter, begun: Container[int], direct: DirectBody, sequences: Sequence[SequenceText]):
        """``begun``: the sequences whose first chunk has been written; from then on they have nothing but text."""
        self._chunk = chunks.plain
        self._begun = begun
        self._is_clear = direct.is_clear
        self._put = direct.put
        self._sequences = sequences

    def take(self, index: int, token_ids: list[int]) -> bool:
        if index not in self._begun or not self._is_clear():
            return False
        text = self._sequences[index].plain(token_ids)
        if text:
            self._put(self._chunk(index, text))
        return True
