"""The data plane computes what independent implementations compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.worker.batch import StepRows
from fastengine.worker.model_host import ModelHost
from tests.conftest import load_golden
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import Driver, Request
from tests.worker.models import NUM_BLOCKS

LOGIT_TOLERANCE = 2e-3
SURE_MARGIN = 0.25
NUM_GREEDY = 24


@pytest.fixture(params=["llama", "llama_tied"])
def family(request: pytest.FixtureRequest, golden: Path) -> tuple[ModelHost, dict[str, np.ndarray]]:
    directory = golden / request.param
    return loaded_host(directory), dict(np.load(directory / "golden.npz"))


def prompts(data: dict[str, np.ndarray]) -> list[list[int]]:
    return [data[f"prompt_{i}"].tolist() for i in range(4)]


def full_logits(host: ModelHost, prompt: list[int]) -> np.ndarray:
    """Logits of every position of ``prompt`` in one forward pass."""
    model, batch = host.model, host.batch
    assert model is not None
    assert batch is not None
    num_blocks = -(-len(prompt) // batch.block_size)
    batch.tokens[0, : len(prompt)] = prompt
    batch.num_tokens[0] = len(prompt)
    batch.block_table[0, :num_blocks] = np.arange(num_blocks) * 3 % NUM_BLOCKS
    rows = StepRows(np.array([0], np.int32), np.array([0], np.int32), np.array([len(prompt)], np.int32), 0)
    assert host.cache is not None
    return model.logits(model.forward(batch.inputs(rows), host.cache)).numpy()


def test_logits_of_whole_prompts(family: tuple[ModelHost, dict[str, np.ndarray]]) -> None:
    host, data = family
    for i, prompt in enumerate(prompts(data)):
        assert np.abs(full_logits(host, prompt) - data[f"logits_{i}"]).max() < LOGIT_TOLERANCE


def test_greedy_tokens_whatever_the_chunks(family: tuple[ModelHost, dict[str, np.ndarray]]) -> None:
    host, data = family
    rng = np.random.default_rng(3)
    driver = driver_of(host)
    for chunk_size in (lambda: 1 << 20, lambda: 1, lambda: int(rng.integers(1, 20)), lambda: int(rng.integers(1, 60))):
        requests = driver.run([Request(prompt, NUM_GREEDY, arrival_step=i) for i, prompt in enumerate(prompts(data))], chunk_size)
        for i, request in enumerate(requests):
            expected = data[f"greedy_{i}"].tolist()
            assert request.output[: len(expected)] == expected


def test_smollm2_greedy(smollm2: Driver) -> None:
    cases: list[dict[str, Any]] = load_golden("smollm2_q4_1.json")
    sure = [next((n for n, margin in enumerate(case["margins"]) if margin < SURE_MARGIN), len(case["margins"])) for case in cases]
    requests = smollm2.run([Request(case["prompt_ids"], max(1, count)) for case, count in zip(cases, sure, strict=True)])
    for case, count, request in zip(cases, sure, requests, strict=True):
        assert request.output[:count] == case["greedy_ids"][:count]
    assert sum(sure) > 50


def test_smollm2_first_logprobs(smollm2: Driver) -> None:
    case = load_golden("smollm2_q4_1.json")[0]
    (request,) = smollm2.run([Request(case["prompt_ids"], 1, SamplingParams(temperature=0.0, logprobs=5))])
    (entry,) = request.logprobs
    assert entry.top_ids == [token for token, _ in case["first_logprobs"]]
    assert np.allclose(entry.top_logprobs, [value for _, value in case["first_logprobs"]], atol=2e-3)
    assert entry.logprob == pytest.approx(entry.top_logprobs[0])
    assert entry.rank == 1
