"""The offline LLM as programs misuse it: threads, reference cycles, wrong arguments, a dead engine."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastengine import LLM, SamplingParams
from fastengine.entrypoints.llm import EngineDied, GenerationError
from tests.e2e.conftest import TINY
from tests.server import alive, process_tree, wait_until

FLAGS: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 64, "max_model_len": 256, "max_waiting_requests": 8, "max_queued_tokens": 1000}
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(TINY), **FLAGS) as made:
        yield made


def children() -> list[int]:
    return [pid for pid in process_tree(os.getpid()) if pid != os.getpid()]


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(3, 11)]
    alone = [llm.generate([p], SHORT, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: llm.generate([p], SHORT, use_tqdm=False)[0].outputs[0].token_ids, prompts, timeout=60))
    assert together == alone


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        (None, SHORT, TypeError),
        ([5.5], SHORT, TypeError),
        (b"x", SHORT, TypeError),
        ("x", {"max_tokens": 2}, TypeError),
        (["a", "b"], [SHORT], ValueError),
        ("x", SamplingParams(max_tokens=2.5), ValueError),  # type: ignore[arg-type]
        ("x", SamplingParams(temperature=-1), ValueError),
        ("x", SamplingParams(temperature=float("nan")), ValueError),
        ("x", SamplingParams(repetition_penalty=1e-300), ValueError),
        ("x", SamplingParams(seed=2**70), ValueError),
        ("x", SamplingParams(stop=5), ValueError),  # type: ignore[arg-type]
        ("x", SamplingParams(logit_bias={10**6: 1.0}), ValueError),
        ([[1], [10**6]], SHORT, ValueError),
        ([[2**40]], SHORT, ValueError),
        ([[-1]], SHORT, ValueError),
        ([[1] * 400], SHORT, GenerationError),
        ([[1], [1] * 400], SHORT, GenerationError),
    ],
)
def test_a_wrong_argument_is_an_exception_and_harms_nothing(llm: LLM, prompts: Any, params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.generate(prompts, params, use_tqdm=False)
    assert len(llm.generate([5, 6, 7], SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize(("count", "length"), [(40, 3), (10, 200)], ids=["requests", "tokens"])
def test_more_prompts_than_the_engine_lets_wait_are_all_answered(llm: LLM, count: int, length: int) -> None:
    prompts = [[3 + i] * length for i in range(count)]
    requests = llm.generate(prompts, SHORT, n=2, use_tqdm=False)
    assert [request.prompt_token_ids for request in requests] == prompts
    assert [len(output.token_ids) for request in requests for output in request.outputs] == [6] * (2 * count)


def test_an_n_that_can_not_be_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n must be at least 1"):
        llm.generate([1, 2], SHORT, n=0)


def test_chat_takes_messages_only(llm: LLM) -> None:
    with pytest.raises(TypeError, match="list of messages"):
        llm.chat("hello", SHORT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}], SHORT)


def test_collection_of_a_reference_cycle_stops_the_engine() -> None:
    before = set(children())
    made: Any = LLM(str(TINY), **FLAGS)
    made.itself = made
    started = set(children()) - before
    assert started
    del made
    gc.collect()
    wait_until(lambda: not alive(list(started)), 10, "the end of the engine's processes")


def test_a_dead_engine_is_an_exception_and_closing_twice_is_fine(llm: LLM) -> None:
    """The last of the tests that share it."""
    engine = llm._connection.engine.process.pid
    processes = list(process_tree(engine))
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(EngineDied):
        llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
    llm.close()
    llm.close()
    with pytest.raises(EngineDied, match="closed"):
        llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
    wait_until(lambda: not alive(processes), 10, "the end of the engine's processes")
