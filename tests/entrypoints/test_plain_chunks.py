"""Text that comes with nothing else goes straight to the connection, and a stream is the same with and without that."""

from __future__ import annotations

from typing import Any

import pytest

from fastengine.entrypoints.openai.chunks import ChunkWriter, PlainChunks
from fastengine.frontend.http_protocol import DirectBody
from fastengine.frontend.text_stream import SequenceText
from fastengine.protocol.requests import SamplingParams
from fastengine.text.output_text import OutputText
from tests.entrypoints.test_chat import chunks
from tests.frontend.harness import ByteTokenizer, say

TEXT = "Hello, wörld \u2028 😀!"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with usage": {"stream_options": {"include_usage": True}},
    "with usage in every chunk": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "with a stop string": {"stop": ["never"]},
    "with token ids": {"return_token_ids": True},
    "several tokens a chunk": {"max_streaming_response_tokens": 3},
    "two answers": {"n": 2},
}


class Connection:
    """Stands where a DirectBody does."""

    def __init__(self) -> None:
        self.clear = True
        self.written: list[bytes] = []

    def is_clear(self) -> bool:
        return self.clear

    def put(self, body: bytes) -> None:
        self.written.append(body)


def test_only_a_sequence_that_has_begun_and_a_clear_connection_take_tokens() -> None:
    connection, begun = Connection(), {0}
    writer = ChunkWriter({"id": "x"}, before_text=b'"text":', after_text=b"", usage_field=False)
    sequences = [SequenceText(i, OutputText(ByteTokenizer(), [], SamplingParams()), min_tokens_per_update=1) for i in range(2)]
    direct: DirectBody = connection  # type: ignore[assignment]
    plain = PlainChunks(writer, begun, direct, sequences)
    assert plain.take(0, [0xC3])  # half a character is no event
    assert connection.written == []
    assert plain.take(0, [0xB6, ord("k")])
    assert not plain.take(1, [ord("a")])
    connection.clear = False
    assert not plain.take(0, [ord("b")])
    connection.clear = True
    begun.add(1)
    assert plain.take(1, [ord("c")])
    assert connection.written == [writer.plain(0, "ök"), writer.plain(1, "c")]
    assert [sequence.num_output_tokens for sequence in sequences] == [3, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_stream_is_the_same_whichever_way_its_tokens_go(api, kind: str, way: str) -> None:
    api.engine.script = say(TEXT)
    path, asked = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}) if kind == "chat" else ("/v1/completions", {"prompt": "hi"})
    )
    parts = chunks(api, path, **asked, **WAYS[way], max_tokens=100)
    texts: dict[int, str] = {}
    finished: dict[int, str] = {}
    for part in parts:
        for choice in part["choices"]:
            assert choice["index"] not in finished
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content", "") if kind == "chat" else choice["text"])
            if choice["finish_reason"] is not None:
                finished[choice["index"]] = choice["finish_reason"]
    indices = range(WAYS[way].get("n", 1))
    assert texts == dict.fromkeys(indices, TEXT)
    assert finished == dict.fromkeys(indices, "stop")
    if "stream_options" in WAYS[way]:
        assert parts[-1]["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
