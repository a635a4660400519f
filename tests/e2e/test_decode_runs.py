"""The default model in runs of decode steps: every answer is what it is step by step.

Runs of a second have as many steps as a plan may, on a busy machine as well.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastengine import LLM, SamplingParams
from tests.conftest import load_golden
from tests.server import Server, running_server

FLAGS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 64, "check_invariants": True}
PROMPTS = [row["prompt_ids"] for row in load_golden("smollm2_q4_1.json")]
# Not all of them plain, of different lengths: runs begin and end all the time.
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=70),
    SamplingParams(temperature=0.8, seed=5, max_tokens=41),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=6, max_tokens=64),
    SamplingParams(temperature=0.0, max_tokens=48, min_tokens=10, stop=(" the", ",", ".", "\n")),
    SamplingParams(temperature=0.0, max_tokens=30, min_tokens=4),
    SamplingParams(temperature=0.7, seed=7, max_tokens=25, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
]


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    """Of every sampling alone, and of all at once."""
    batches = [[sampling] for sampling in SAMPLINGS[:4]] + [SAMPLINGS]
    outputs = []
    for batch in batches:
        for result in llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(batch))], batch, use_tqdm=False):
            (one,) = result.outputs
            outputs.append((one.token_ids, one.text, one.finish_reason, one.logprobs))
    return outputs


@pytest.mark.model
def test_answers_are_those_of_single_steps(default_model: Path, default_llm: LLM) -> None:
    with LLM(str(default_model), decode_run_ms=0.0, **FLAGS) as llm:
        expected = answers(llm)
    assert answers(default_llm) == expected
    assert {reason for _, _, reason, _ in expected} == {"length", "stop"}


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    with running_server(default_model, "--max-model-len", "512", "--check-invariants", "--decode-run-ms", "1000") as started:
        yield started


def deltas(server: Server, **fields: Any) -> Iterator[dict[str, Any]]:
    """The choices of a streamed completion, as they come."""
    body = {"model": "default", "prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, "return_token_ids": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body | fields, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line[6:])["choices"]


def joined(choices: list[dict[str, Any]]) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of one sequence's deltas."""
    return (
        [token for choice in choices for token in choice["completion_token_ids"] or ()],
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
    )


@pytest.mark.model
def test_a_streams_deltas_hold_several_tokens(server: Server) -> None:
    choices = list(deltas(server, max_tokens=100))
    token_ids, text, reason = joined(choices)
    assert (len(token_ids), reason) == (100, "length")
    assert len(choices) < 60
    at_most_ten = list(deltas(server, max_tokens=100, max_streaming_response_tokens=10))
    assert joined(at_most_ten)[:2] == (token_ids, text)
    both = list(deltas(server, max_tokens=100, n=2))
    for index in (0, 1):
        assert joined([choice for choice in both if choice["index"] == index])[:2] == (token_ids, text)
    word = text.split()[40]
    stopped_ids, stopped, reason = joined(list(deltas(server, max_tokens=100, stop=[word])))
    assert (stopped, reason) == (text[: text.index(word)], "stop")
    assert stopped_ids == token_ids[: len(stopped_ids)]
    with_logprobs = list(deltas(server, max_tokens=100, logprobs=1))
    assert joined(with_logprobs)[:2] == (token_ids, text)
    assert sum(len(choice["logprobs"]["tokens"]) for choice in with_logprobs) == 100


@pytest.mark.model
def test_a_stream_outlives_a_worker_that_is_killed_within_a_run(server: Server) -> None:
    choices: list[dict[str, Any]] = []
    victim = server.find("worker/__main__.py")
    for choice in deltas(server, max_tokens=200):
        choices.append(choice)
        if len(joined(choices)[0]) > 40 and victim:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    assert not victim
    token_ids, _, reason = joined(choices)
    assert (len(token_ids), reason) == (200, "length")
    assert server.metric("worker_crashes_total") == 1
