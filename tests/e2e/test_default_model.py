"""The default model answers over HTTP as its reference does, alone and in company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from fastengine import LLM, SamplingParams
from tests.conftest import load_golden
from tests.server import Server

GOLDEN = load_golden("smollm2_q4_1.json")
COUNT = [{"role": "user", "content": "Count from 1 to 20."}]
# Steps whose best two tokens are closer than this may come out otherwise in other arithmetic.
SMALLEST_MARGIN = 0.25


def sure_prefix(row: dict[str, Any]) -> list[int]:
    for step, margin in enumerate(row["margins"]):
        if margin < SMALLEST_MARGIN:
            return row["greedy_ids"][:step]
    return row["greedy_ids"]


def chat(server: Server, **changes: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": COUNT, "max_tokens": 32, "temperature": 0, "return_token_ids": True, **changes}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["messages"][-1]["content"][:20])
def test_greedy_answers_equal_the_reference(default_server: Server, row: dict[str, Any]) -> None:
    message = chat(default_server, messages=row["messages"], max_tokens=len(row["greedy_ids"]))["message"]
    assert message["prompt_token_ids"] == row["prompt_ids"]
    expected = sure_prefix(row)
    assert len(expected) > 0 or row["margins"][0] < SMALLEST_MARGIN
    assert message["completion_token_ids"][: len(expected)] == expected


def test_greedy_answers_are_the_same_alone_and_among_32_mixed_requests(default_server: Server) -> None:
    alone = [chat(default_server, messages=row["messages"], max_tokens=24)["message"]["completion_token_ids"] for row in GOLDEN]
    mixed: list[dict[str, Any]] = [{"messages": row["messages"], "max_tokens": 24} for row in GOLDEN]
    sampled = [{"max_tokens": 5 + i, "temperature": 0.5 + i / 10, "top_p": 0.9, "top_k": i, "seed": i} for i in range(32 - len(mixed))]
    for i, extra in enumerate(sampled):
        extra["messages"] = [{"role": "user", "content": "Tell me a story. " * (1 + 7 * i)}]
    order = sorted(range(32), key=lambda i: i * 13 % 32)
    bodies = mixed + sampled
    with ThreadPoolExecutor(32) as pool:
        together = dict(zip(order, pool.map(lambda i: chat(default_server, **bodies[i]), order), strict=True))
    for i, expected in enumerate(alone):
        assert together[i]["message"]["completion_token_ids"] == expected


def test_a_seeded_answer_repeats_whatever_else_runs(default_server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1.0, "seed": 11, "max_tokens": 20}
    alone = chat(default_server, **body)["message"]["completion_token_ids"]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(chat, default_server, temperature=1.0, max_tokens=20 + i) for i in range(7)]
        again = chat(default_server, **body)["message"]["completion_token_ids"]
        assert all(other.result()["finish_reason"] in ("stop", "length") for other in others)
    assert again == alone


def test_the_openai_sdk_streams_the_same_text(default_server: Server) -> None:
    client = openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model="default", messages=COUNT, max_tokens=30, temperature=0)
    stream = client.chat.completions.create(
        model="default", messages=COUNT, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_metrics_are_the_same_from_every_api_process(default_server: Server) -> None:
    """Two processes answer on one port; any of them tells the whole server's totals."""

    def total() -> float:
        text = httpx.get(default_server.url + "/metrics", timeout=10).text  # a new connection each time: any process may take it
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("fastengine:request_success_total"))

    before = total()
    for _ in range(4):
        chat(default_server, max_tokens=1)
    assert {total() for _ in range(6)} == {before + 4}


def test_offline_llm_gives_the_same_answer(default_llm: LLM) -> None:
    rows = GOLDEN[:4]
    outputs = default_llm.chat([row["messages"] for row in rows], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    for row, output in zip(rows, outputs, strict=True):
        assert output.prompt_token_ids == row["prompt_ids"]
        expected = sure_prefix(row)[:16]
        assert output.outputs[0].token_ids[: len(expected)] == expected
    stopped = default_llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=40, stop=("8",)), n=2, use_tqdm=False)[0]
    assert [c.finish_reason for c in stopped.outputs] == ["stop", "stop"]
    assert stopped.outputs[0].text == stopped.outputs[1].text
    assert stopped.outputs[0].text.endswith("7, ")
    with pytest.raises(Exception, match=r"\d"):
        default_llm.generate([[1] * 600], use_tqdm=False)
    assert default_llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].finish_reason == "length"
