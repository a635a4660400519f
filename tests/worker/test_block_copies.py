"""A sequence that begins with a copy of another's block goes on as if it had computed all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StepPlan
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids
from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.model_host import ModelHost
from tests.worker.models import hf_config, random_weights, write_model
from tests.worker.test_runner import chunk, started

SIZE = 16
NUM_NEW = 6
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_copied_with_all_that_belongs_to_them(dtype: str) -> None:
    rng = np.random.default_rng(0)
    cache = KVCache(KVShape(2, 2, 8, 16, dtype), 8, 0, "cpu")
    storages = [storage for layer in cache.layers for storage in layer.storages()]
    for _ in range(2):
        for storage in storages:
            storage.write((slice(None),), rng.integers(1, 100, storage.shape).astype(np.float32))
        before = [storage.bits((slice(None),)).copy() for storage in storages]
        cache.copy(np.array([[5, 0], [2, 3], [5, 7]], np.int32))
        for storage, old in zip(storages, before, strict=True):
            np.testing.assert_array_equal(storage.bits((slice(None),)), old[[5, 1, 2, 2, 4, 5, 6, 5]])
        # After a night the pools lie elsewhere.
        cache.drop()
        cache.allocate()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf_config()
    return write_model(tmp_path_factory.mktemp("model"), config, random_weights(config))


def answer(host: ModelHost, step_id: int, plan: StepPlan, slot: int) -> tuple[list[int], list[TopLogprobs]]:
    """What a greedy sequence in ``slot``, started by ``plan``, samples."""
    tokens, logprobs = [], []
    for at in range(NUM_NEW):
        result = host.step(plan if at == 0 else StepPlan(step_id=step_id + at, decodes=pack_token_ids([slot])))
        assert not result.errors
        tokens += unpack_token_ids(result.token_ids).tolist()
        logprobs += result.logprobs[0].tokens
    return tokens, logprobs


@pytest.mark.parametrize("num_shared", [1, 5, 15, 16 + 9])
@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"), [("none", "float32"), ("none", "bfloat16"), ("wint8", "float32"), ("wint8", "bfloat16"), ("wint8", "int8")]
)
def test_a_copied_beginning_changes_no_bit(
    model_path: Path, make_host: Callable[..., ModelHost], quantization: str, kv_cache_dtype: str, num_shared: int
) -> None:
    host = make_host(model_path, 8, 0, quantization=quantization, kv_cache_dtype=kv_cache_dtype, block_size=SIZE)
    first = list(range(10, 10 + 2 * SIZE))
    second = [*first[:num_shared], *range(70, 70 + 12)]
    alone = started(1, second, [3, 4, 5], sampling=WITH_LOGPROBS)
    expected = answer(host, 0, chunk(0, 1, 0, len(second), started=[alone]), 1)
    host.init_cache(8, 0)
    host.step(chunk(20, 0, 0, len(first), started=[started(0, first, [0, 1])]))
    place = num_shared // SIZE  # of the block that is shared in part
    table = [*range(place), 3, 4, 5]
    copying = started(1, second, table, num_computed=num_shared, sampling=WITH_LOGPROBS)
    plan = chunk(21, 1, num_shared, len(second) - num_shared, started=[copying], copies=pack_token_ids([place, 3]))
    assert answer(host, 21, plan, 1) == expected
