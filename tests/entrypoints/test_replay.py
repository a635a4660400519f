"""Recorded requests are sent again as they were, and their answers compared."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from fastengine.entrypoints.cli import main
from fastengine.entrypoints.openai.request_types import CompletionRequest
from fastengine.entrypoints.openai.structured import structured_output
from fastengine.entrypoints.replay import body_of
from fastengine.observability.request_log import RequestRecord, append_lines, read_requests
from fastengine.protocol.requests import GrammarSpec, ReasoningSpec, SamplingParams


def record(name: str, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": name,
        "client_index": 0,
        "state": "finished",
        "finish_reason": "length",
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [4, 5],
        "sampling": SamplingParams(max_tokens=2, temperature=0.5, logit_bias={7: 1.5}, stop=("x",), top_k=3),
        "seed": 11,
        "arrived_at_s": 1000.0,
        "total_s": 1.0,
    }
    return RequestRecord(**{**values, **changes})


class Handler(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        status, reply = (400, b'{"error": "no"}') if body["seed"] == 400 else (200, b'{"choices": [{"completion_token_ids": [4, 5]}]}')
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_body_says_all_that_was_recorded_and_is_one_the_server_accepts() -> None:
    body = body_of(record("a"))
    checked = msgspec.convert(body, CompletionRequest)
    assert checked.prompt == [1, 2, 3]
    assert (checked.seed, checked.max_tokens, checked.temperature, checked.top_k) == (11, 2, 0.5, 3)
    assert checked.logit_bias == {"7": 1.5}
    assert checked.stop == ["x"]


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": {"type": "object", "properties": {"b": {}, "a": {}}}},
        {"guided_json_object": True},
        {"guided_regex": "a+"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "a"'},
        {"structural_tag": {"structures": [], "triggers": ["<"]}},
    ],
)
def test_a_grammar_is_asked_for_as_it_was(asked: dict[str, Any]) -> None:
    grammar = structured_output(msgspec.convert(asked, CompletionRequest))
    assert grammar is not None
    body = msgspec.convert(body_of(record("a", sampling=SamplingParams(grammar=grammar.grammar))), CompletionRequest)
    assert structured_output(body) == grammar


def test_bad_words_are_sent_as_tokens_and_an_unknown_seed_is_left_out() -> None:
    body = body_of(record("a", seed=None, sampling=SamplingParams(bad_words_token_ids=((1, 2), (3,)))))
    assert msgspec.convert(body, CompletionRequest).bad_words_token_ids == [[1, 2], [3]]
    assert "seed" not in body


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(pooling="mean"),
        SamplingParams(reasoning=ReasoningSpec(end_token_id=3, max_tokens=5)),
        SamplingParams(reasoning=ReasoningSpec(end_token_id=3), grammar=GrammarSpec("regex", "a")),
    ],
)
def test_what_completions_cannot_say_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(ValueError, match=r"embedding|reasoning"):
        body_of(record("a", sampling=sampling))


def test_a_file_is_replayed_and_its_answers_compared(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "crash.jsonl"
    cut_short = record("cut", state="running", finish_reason=None, output_token_ids=[4])
    records = [record("same"), cut_short, record("other", output_token_ids=[4, 6]), record("bad", seed=400)]
    append_lines(file, [{"kind": "crash", "reason": "x"}, *records])
    assert list(read_requests(file)) == records
    assert main(["replay", str(file), "--url", url, "--concurrency", "2"]) == 1
    output = capsys.readouterr().out
    assert "4 requests: 2 same output, 1 different output, 1 refused" in output
    assert "other: different output: from token 1 on" in output
    assert "bad: refused: HTTP 400" in output
    assert len(Handler.bodies) == 4


def test_timing_can_be_kept(tmp_path: Path, url: str) -> None:
    file = tmp_path / "requests.jsonl"
    append_lines(file, [record("late", arrived_at_s=1000.4, seed=2), record("early", seed=1)])
    assert main(["replay", str(file), "--url", url, "--keep-timing"]) == 0
    assert [body["seed"] for body in Handler.bodies] == [1, 2]


def test_a_file_that_is_none_of_ours_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"kind": "crash"}\n{"kind": "request", "request_id": 5}\n')
    assert main(["replay", str(file), "--url", "http://127.0.0.1:1"]) == 1
    assert f"{file}, line 2" in capsys.readouterr().err
