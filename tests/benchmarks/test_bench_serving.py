"""The load generator against a small server whose answers, and whose failures, are known."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_serving
from serving_load import RequestRecord, Usage, summarize

TEMPLATE_TOKENS = 9  # what the fake server's chat template adds


class FakeServer:
    """Streams ``max_tokens`` chunks, one a token; ``mode`` makes it fail in one particular way."""

    def __init__(self) -> None:
        self.mode = "good"
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.connections = 0
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                self.authorizations.append(headers.get("authorization", ""))
                writer.write(self._answer(first.split(" ")[1], body))
                if self.mode == "hangs_up":
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has closed the connection, or the test is over
        finally:
            writer.close()

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == "/v1/models":
            return plain(200, {"data": [{"id": "fake"}]})
        request = json.loads(body)
        self.bodies.append(request)
        if self.mode == "refuses" or (self.mode == "no_second_turn" and len(request["messages"]) > 1):
            return plain(429, {"error": {"message": "too many requests"}})
        return stream(list(self._events(path, request)), whole=self.mode != "hangs_up")

    def _events(self, path: str, request: dict[str, Any]) -> Iterator[str]:
        chat = path == "/v1/chat/completions"
        prompt = " ".join(message["content"] for message in request["messages"]) if chat else request["prompt"]
        if chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(request["max_tokens"]):
            yield json.dumps({"choices": [{"delta": {"content": " a"}} if chat else {"text": " a"}]})
        if self.mode == "error_event":
            yield json.dumps({"error": {"message": "out of blocks"}})
        if self.mode != "no_usage":
            usage: dict[str, Any] = {"completion_tokens": request["max_tokens"]}
            usage["prompt_tokens"] = len(prompt.split()) + (TEMPLATE_TOKENS if chat else 0)
            if chat and len(request["messages"]) > 1:  # as if the first message had been cached
                usage["prompt_tokens_details"] = {"cached_tokens": len(request["messages"][0]["content"].split())}
            yield json.dumps({"choices": [], "usage": usage})
        if self.mode != "no_done":
            yield "[DONE]"


def plain(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def stream(events: list[str], *, whole: bool) -> bytes:
    chunks = [f"data: {event}\n\n".encode() for event in events]
    body = b"".join(b"%x\r\n" % len(chunk) + chunk + b"\r\n" for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (body + b"0\r\n\r\n" if whole else body[:-20])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def run_bench(server_arguments: list[str], tmp_path: Path, *extra: str) -> tuple[int, list[dict[str, Any]]]:
    out = tmp_path / "out.json"
    code = bench_serving.main([*server_arguments, "--json", str(out), *extra])
    return code, json.loads(out.read_text())["cells"]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_counts_tokens_and_requests(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str) -> None:
    sizes = ["--concurrency", "1", "3", "--requests-per-stream", "2", "--input-tokens", "20", "--output-tokens", "5"]
    code, cells = run_bench(["--url", server.url, "--api", api, *sizes], tmp_path, "--no-warmup")
    assert code == 0
    for cell, streams in zip(cells, (1, 3), strict=True):
        summary = cell["summary"]
        assert (cell["concurrency"], summary["requests"], summary["failures"]) == (streams, 2 * streams, 0)
        assert summary["output_tokens"] == 2 * streams * 5
        assert summary["prompt_tokens"] == 2 * streams * 20  # calibrated to the server's own count
        assert summary["tokens_per_chunk"] == 1.0
        assert 0 < summary["ttft_p50"] <= summary["e2e_p50"]
    measured = server.bodies[-8:]
    prompts = [body["messages"][0]["content"] if api == "chat" else body["prompt"] for body in measured]
    assert len(set(prompts)) == 8
    assert set(measured[0]) == {"model", "max_tokens", "temperature", "stream", "stream_options", "messages" if api == "chat" else "prompt"}
    assert measured[0]["model"] == "fake"
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| server | streams | output tokens/s |")
    assert len(table) == 4


def test_streams_keep_their_connections(server: FakeServer, tmp_path: Path) -> None:
    sizes = ["--concurrency", "2", "--requests-per-stream", "5", "--output-tokens", "2", "--model", "m", "--dataset", str(tmp_path / "prompts")]
    (tmp_path / "prompts").write_text("one\n\ntwo\nthree\n")
    code, _ = run_bench(["--url", server.url, *sizes, "--no-warmup"], tmp_path)
    assert code == 0
    assert server.connections == 2
    assert sorted({body["messages"][0]["content"] for body in server.bodies}) == ["one", "three", "two"]


def test_several_servers_take_turns_on_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = FakeServer(), FakeServer()
    try:
        sizes = ["--concurrency", "2", "--requests-per-stream", "1", "--output-tokens", "4", "--rounds", "2"]
        code, cells = run_bench(["--url", f"first={a.url}", "--url", f"second={b.url}/v1", *sizes], tmp_path)
    finally:
        a.close()
        b.close()
    assert code == 0
    assert [(c["target"], c["round"]) for c in cells] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    prompts_a, prompts_b = ([body["messages"][0]["content"] for body in s.bodies[-4:]] for s in (a, b))
    assert sorted(prompts_a) == sorted(prompts_b)
    out = capsys.readouterr().out
    assert "Relative to first:" in out
    assert sum(line.startswith("| second | 2 |") for line in out.splitlines()) == 2


def test_a_common_system_message_counts_as_prompt(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--concurrency", "2", "--requests-per-stream", "2", "--input-tokens", "50", "--output-tokens", "3", "--system-words", "20"]
    _, cells = run_bench(["--url", server.url, *sizes], tmp_path)
    messages = [body["messages"] for body in server.bodies[-4:]]
    assert [[message["role"] for message in one] for one in messages] == [["system", "user"]] * 4
    assert len({system["content"] for system, _ in messages}) == 1
    assert len({user["content"] for _, user in messages}) == 4
    summary = cells[0]["summary"]
    assert (summary["prompt_tokens"], summary["cached_prompt_share"]) == (4 * 50, 20 / 50)
    assert "| 40% | 0 of 4 |" in capsys.readouterr().out


def test_a_turn_sends_all_that_was_said_before(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--requests-per-stream", "2", "--input-tokens", "30", "--output-tokens", "3", "--turns", "3", "--turn-words", "5"]
    code, cells = run_bench(["--url", server.url, "--concurrency", "2", *sizes], tmp_path, "--no-warmup")
    assert code == 0
    conversations: dict[str, list[list[dict[str, str]]]] = {}
    for body in server.bodies[-12:]:
        conversations.setdefault(body["messages"][0]["content"], []).append(body["messages"])
    assert len(conversations) == 4
    later_texts = set()
    for first, second, third in conversations.values():
        assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]
        assert (third[:3], second[:1]) == (second, first)
        assert [message["content"] for message in third if message["role"] == "assistant"] == [" a a a", " a a a"]
        assert [len(message["content"].split()) for message in third[2::2]] == [5, 5]
        later_texts |= {second[2]["content"], third[4]["content"]}
    assert len(later_texts) == 8
    cell = cells[0]
    assert (cell["summary"]["requests"], [turn["requests"] for turn in cell["turns"]]) == (12, [4, 4, 4])
    assert [turn["prompt_tokens"] for turn in cell["turns"]] == [4 * 30, 4 * 38, 4 * 46]
    assert [turn["cached_prompt_share"] for turn in cell["turns"]] == [None, 21 / 38, 21 / 46]
    assert sum(turn["output_tokens"] for turn in cell["turns"]) == cell["summary"]["output_tokens"] == 36
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| http")]
    assert [row.split(" | ")[1:5] for row in rows[1:]] == [["2", "1", "30", "not told"], ["2", "2", "38", "55%"], ["2", "3", "46", "46%"]]


def test_turns_of_completions_go_on_in_one_text(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    sizes = ["--concurrency", "1", "--requests-per-stream", "1", "--output-tokens", "2", "--turns", "2", "--dataset", str(tmp_path / "prompts")]
    run_bench(["--url", server.url, "--api", "completions", *sizes], tmp_path, "--no-warmup")
    first, second = (body["prompt"] for body in server.bodies)
    assert (first, second) in [("one", "one a a\ntwo"), ("two", "two a a\none")]


def test_repeated_conversations_are_one(server: FakeServer, tmp_path: Path) -> None:
    sizes = ["--concurrency", "2", "--requests-per-stream", "2", "--output-tokens", "2", "--turns", "2", "--dataset", "repeated"]
    run_bench(["--url", server.url, *sizes], tmp_path, "--no-warmup")
    said = [tuple(message["content"] for message in body["messages"]) for body in server.bodies[-8:]]
    assert sorted(map(len, said)) == [1] * 4 + [3] * 4
    assert len(set(said)) == 2


def test_a_failed_turn_ends_its_conversation(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.mode = "no_second_turn"
    sizes = ["--concurrency", "2", "--requests-per-stream", "2", "--input-tokens", "20", "--output-tokens", "2", "--turns", "3"]
    code, cells = run_bench(["--url", server.url, *sizes], tmp_path, "--no-warmup")
    assert code == 1
    assert [(turn["requests"], turn["failures"]) for turn in cells[0]["turns"]] == [(4, 0), (4, 4), (0, 0)]
    assert (cells[0]["summary"]["requests"], cells[0]["summary"]["failures"]) == (8, 4)
    assert "| 4 of 8 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("refuses", "HTTP 429"),
        ("error_event", "out of blocks"),
        ("no_done", "without [DONE]"),
        ("hangs_up", "closed in the middle of a reply"),
    ],
)
def test_failures_are_counted_and_named(server: FakeServer, tmp_path: Path, mode: str, error: str) -> None:
    server.mode = mode
    (tmp_path / "prompts").write_text("one\n")
    arguments = [
        "--url",
        server.url,
        "--concurrency",
        "2",
        "--requests-per-stream",
        "2",
        "--dataset",
        str(tmp_path / "prompts"),
        "--output-tokens",
        "3",
    ]
    code, cells = run_bench(arguments, tmp_path, "--no-warmup")
    summary = cells[0]["summary"]
    assert code == 1
    assert (summary["requests"], summary["failures"], summary["output_tokens"]) == (4, 4, 0)
    assert error in summary["errors"][0]
    assert summary["ttft_p50"] is None  # no number rather than a wrong one


def test_without_usage_chunks_are_counted(server: FakeServer, tmp_path: Path) -> None:
    server.mode = "no_usage"
    code, cells = run_bench(["--url", server.url, "--concurrency", "1", "--requests-per-stream", "2", "--output-tokens", "7"], tmp_path)
    assert code == 0
    assert cells[0]["summary"]["output_tokens"] == 14


def test_optional_fields_are_sent_only_when_asked_for(server: FakeServer, tmp_path: Path) -> None:
    arguments = ["--url", server.url, "--concurrency", "1", "--requests-per-stream", "1", "--api-key", "secret"]
    run_bench(arguments, tmp_path, "--ignore-eos", "--extra-body", '{"cache_prompt": false, "temperature": 1}')
    assert {"ignore_eos": True, "cache_prompt": False, "temperature": 1}.items() <= server.bodies[-1].items()
    assert set(server.authorizations) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "out.json").read_text()


def test_a_server_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is the server up"):
        bench_serving.main(["--url", "http://127.0.0.1:9"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "127.0.0.1:8188"],
        ["--url", "a=http://x", "--url", "a=http://y"],
        ["--url", "http://x", "--concurrency", "0"],
        ["--url", "http://x", "--dataset", "nowhere"],
        ["--url", "http://x", "--system-words", "20", "--api", "completions"],
        ["--url", "http://x", "--extra-body", "[1]"],
        ["--url", "http://x", "--turns", "0"],
        ["--url", "http://x", "--turn-words", "5"],
        ["--url", "http://x", "--turn-words", "5", "--turns", "2", "--dataset", __file__],
    ],
)
def test_bad_command_lines_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_serving.parse_args(arguments)
    assert refused.value.code == 2


def test_summary_numbers() -> None:
    first = RequestRecord(10.0, [10.1, 10.2, 10.4], 10.5, Usage(8, 6))
    second = RequestRecord(10.0, [10.3], 10.6, Usage(8, 1))
    failed = RequestRecord(10.0, [10.05], 10.1, error="HTTP 500")
    summary = summarize([first, second, failed], wall_s=2.0, client_cpu_s=0.07)
    assert (summary.requests, summary.failures, summary.prompt_tokens, summary.output_tokens) == (3, 1, 16, 7)
    assert summary.output_tokens_per_s == 3.5
    assert summary.ttft_p50 == pytest.approx(200)
    assert summary.itl_p50 == pytest.approx(150)
    assert summary.tpot_p50 == summary.tpot_p99 == pytest.approx(60)  # 300 ms for five tokens after the first
    assert summary.e2e_p50 == pytest.approx(550)
    assert summary.tokens_per_chunk == 7 / 4
    assert summary.client_cpu_us_per_token == pytest.approx(10_000)
    assert math.isnan(summary.cached_prompt_share)
    assert math.isnan(summarize([failed], 1.0, 0.1).itl_p50)
