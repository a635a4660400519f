"""Spans of a request: complete, in order, below the client's trace; and nothing at all when nobody asks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra 'otel' is not installed")

from fastengine.config import ConfigError, EngineConfig
from fastengine.engine.request_spans import RequestSpans
from fastengine.observability.tracing import Tracer, traces_url
from tests.engine.driver import Driver
from tests.observability.collector import CollectedSpan, Collector
from tests.server import running_server

TINY = Path(__file__).parent.parent / "golden" / "llama"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["preprocess", "queue", "prefill", "decode", "postprocess"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def in_order(spans: dict[str, CollectedSpan]) -> list[CollectedSpan]:
    """The stages' spans; fails unless each begins no earlier than the one before it."""
    ordered = [spans[name] for name in STAGES if name in spans]
    starts = [span.start_ns for span in ordered]
    assert starts == sorted(starts)
    assert all(span.start_ns <= span.end_ns for span in ordered)
    return ordered


def test_a_server_tells_all_stages_below_the_clients_trace(collector: Collector) -> None:
    flags = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--max-model-len", "256", "--otlp-endpoint", collector.url)
    before_ns = time.time_ns()
    with running_server(TINY, *flags) as server:
        body = {"model": "default", "prompt": "hello", "max_tokens": 20, "ignore_eos": True}

        def post(request_id: str, **headers: str) -> None:
            reply = httpx.post(server.url + "/v1/completions", json={**body, "request_id": request_id}, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text

        post("mine", traceparent=f"00-{TRACE}-{PARENT}-01")
        post("not-sampled", traceparent=f"00-{'1' * 32}-{PARENT}-00")
        post("own", traceparent="nonsense")
        with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True, "request_id": "streamed"}, timeout=60) as reply:
            assert reply.read()
    # The server has ended: every span was exported on the way out.
    assert collector.paths == {"/v1/traces"}
    mine = collector.of("mine")
    assert sorted(mine) == sorted(STAGES)
    assert {(span.trace_id, span.parent_id) for span in mine.values()} == {(TRACE, PARENT)}
    assert [span.process for span in in_order(mine)] == ["api-0", "engine", "engine", "engine", "api-0"]
    assert before_ns < mine["preprocess"].start_ns < mine["postprocess"].end_ns < time.time_ns()
    assert mine["queue"].end_ns == mine["prefill"].start_ns < mine["prefill"].end_ns == mine["decode"].start_ns
    about = mine["decode"].attributes
    assert (about["output_tokens"], about["finish_reason"], about["preemptions"]) == (20, "length", 0)
    assert collector.of("not-sampled") == {}
    for request_id in ("own", "streamed"):
        spans = collector.of(request_id)
        root = spans.pop("request")
        assert root.parent_id == ""
        assert sorted(spans) == sorted(STAGES)
        assert {(span.trace_id, span.parent_id) for span in spans.values()} == {(root.trace_id, root.span_id)}
        ordered = in_order(spans)
        assert root.start_ns == ordered[0].start_ns
        assert root.end_ns >= ordered[-1].end_ns


def test_a_request_that_never_ran_has_only_queued(collector: Collector) -> None:
    config = EngineConfig.from_flags(otlp_endpoint=collector.url + "/custom/path")
    spans = RequestSpans.of(config, "x")
    assert spans is not None
    driver = Driver(num_blocks=12, max_num_seqs=1)
    driver.core.observe_finished(spans.finished)
    driver.add([5] * 10, max_tokens=200, ignore_eos=True)
    waits = driver.add([6] * 10, max_tokens=5, timeout_s=0.0005)
    for _ in range(3):
        driver.turn()
    assert waits.finish_reason == "error"
    spans.close()
    assert collector.paths == {"/custom/path"}
    told = collector.of(waits.request.request_id)
    assert sorted(told) == ["queue", "request"]
    assert told["queue"].parent_id == told["request"].span_id
    for span in told.values():
        assert span.error is not None
        assert "time limit" in span.error
        assert span.attributes["output_tokens"] == 0


def test_a_collector_that_is_not_there_holds_up_nobody(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastengine.observability.tracing.EXPORT_TIMEOUT_S", 1)
    collector.close()
    tracer = Tracer(collector.url, instance="x", process="engine")
    tracer.record("queue", "", 1, 2, {})
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < 10


def test_where_spans_are_sent() -> None:
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("https://h/otlp/v1/traces") == "https://h/otlp/v1/traces"


def test_the_flag_is_refused_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_sdk(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "opentelemetry.sdk" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_sdk)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint: needs the extra 'otel'"):
        EngineConfig.from_flags(otlp_endpoint="http://h:4318")
    with pytest.raises(ConfigError, match="--otlp-endpoint: must be an http"):
        EngineConfig.from_flags(otlp_endpoint="h:4318")


def test_no_process_loads_the_extra_unasked() -> None:
    program = "import sys, fastengine.engine.__main__, fastengine.frontend.__main__; print([m for m in sys.modules if 'opentelemetry.sdk' in m])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
