"""Embeddings: whatever the chunks, the same vector; and the vector is what it is said to be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StepPlan, StepResult
from fastengine.worker.model_host import ModelHost
from tests.worker.conftest import driver_of
from tests.worker.driver import GREEDY, Driver, Request
from tests.worker.models import NUM_BLOCKS

PROMPT = list(range(3, 60))


def embed(host: ModelHost, prompts: list[list[int]], pooling: str, *, chunk: int = 1 << 30, beside: int = 0) -> list[np.ndarray]:
    """The vectors of ``prompts``, computed in chunks, with ``beside`` ordinary requests in the same batch."""
    host.init_cache(NUM_BLOCKS, 0)
    found: dict[int, np.ndarray] = {}

    def step(plan: StepPlan) -> StepResult:
        result = host.step(plan)
        for entry in result.embeddings:
            assert entry.slot not in found
            found[entry.slot] = np.frombuffer(entry.data, "<f4")
        return result

    driver = Driver(step, max_num_seqs=40, block_size=driver_of(host)._block_size, num_blocks=NUM_BLOCKS)
    pooled = [Request(prompt, 1, SamplingParams(temperature=0.0, pooling=pooling)) for prompt in prompts]  # type: ignore[arg-type]
    others = [Request(PROMPT[: 9 + i], 8, GREEDY) for i in range(beside)]
    driver.run([*others, *pooled], lambda: chunk)
    assert len(found) == len(prompts)
    return [found[request.slot] for request in pooled]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("chunk", [1, 7, 56, 57])
def test_chunks_do_not_matter(llama_host: ModelHost, pooling: str, chunk: int) -> None:
    (whole,) = embed(llama_host, [PROMPT], pooling)
    (split,) = embed(llama_host, [PROMPT], pooling, chunk=chunk, beside=3)
    assert whole.dtype == np.float32
    assert whole.shape == (llama_host.spec.hidden_size,)
    np.testing.assert_allclose(split, whole, atol=1e-4)


def test_the_mean_is_that_of_the_last_states(llama_host: ModelHost) -> None:
    """Causal attention: the state at a position is the last state of the prompt that ends there."""
    prompt = PROMPT[:6]
    states = [embed(llama_host, [prompt[:n]], "last")[0] for n in range(1, 7)]
    np.testing.assert_allclose(embed(llama_host, [prompt], "mean")[0], np.mean(states, axis=0), atol=1e-4)


def test_many_at_once_and_a_slot_used_again(llama_host: ModelHost) -> None:
    prompts = [PROMPT[:n] for n in (5, 20, 1, 33)]
    alone = [embed(llama_host, [prompt], "mean")[0] for prompt in prompts]
    for got, expected in zip(embed(llama_host, prompts, "mean", chunk=6), alone, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    distances = [np.abs(a - b).max() for a, b in itertools.combinations(alone, 2)]
    assert min(distances) > 1e-2


def test_ordinary_requests_have_none(llama_host: ModelHost) -> None:
    llama_host.init_cache(NUM_BLOCKS, 0)
    steps = []
    driver = Driver(lambda plan: steps.append(llama_host.step(plan)) or steps[-1], max_num_seqs=40, block_size=8, num_blocks=NUM_BLOCKS)  # type: ignore[func-returns-value]
    driver.run([Request(PROMPT, 3, GREEDY)])
    assert not any(result.embeddings for result in steps)
