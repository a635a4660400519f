"""Pooled requests: all of the prompt is computed, whatever is cached, and the first output brings the vector."""

from __future__ import annotations

import msgspec
import pytest

from fastengine.engine.outputs import OutputCollector
from fastengine.protocol.outputs import TokenOutput
from fastengine.protocol.steps import SlotEmbedding, StepResult
from tests.engine.driver import Driver

PROMPT = list(range(1, 41))


class PoolingDriver(Driver):
    """Its worker answers a pooled prompt with the positions it has computed; ``embeddings`` are what clients got, by handle."""

    def __init__(self, **flags: object):
        super().__init__(**flags)  # type: ignore[arg-type]
        self.embeddings: dict[int, bytes] = {}
        self.computed: dict[str, list[int]] = {}
        forward = self.worker.forward

        def pooled(step_id: int, rows: list[tuple[int, int, int]]) -> StepResult:
            found = []
            for slot, start, length in rows:
                row = self.worker.slots[slot]
                if row.sampling.pooling is not None and start < row.num_prompt:
                    positions = self.computed.setdefault(row.request_id, [])
                    positions[start:] = range(start, start + length)
                    if start + length == row.num_prompt:
                        found.append(SlotEmbedding(slot, bytes(positions)))
            return msgspec.structs.replace(forward(step_id, rows), embeddings=found)

        self.worker.forward = pooled  # type: ignore[method-assign]

    def deliver_batch(self, client, batch):
        super().deliver_batch(client, batch)
        self.embeddings |= {output.handle: output.embedding for output in batch.details if output.embedding is not None}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_cached_prefix_is_not_used(pooling):
    driver = PoolingDriver()
    driver.add_and_run(PROMPT, max_tokens=2)
    assert driver.add_and_run(PROMPT, max_tokens=2).num_cached > 0
    pooled = driver.add_and_run(PROMPT, max_tokens=1, pooling=pooling)
    assert (pooled.num_cached, pooled.finish_reason) == (0, "length")
    # The token budget of a step is 32: the prompt of 40 came in two chunks.
    assert driver.embeddings == {pooled.request.handle: bytes(range(40))}


def test_its_own_blocks_serve_others():
    driver = PoolingDriver()
    driver.add_and_run(PROMPT, max_tokens=1, pooling="mean")
    assert driver.add_and_run(PROMPT, max_tokens=2).num_cached > 0


def test_many_with_too_few_blocks_and_preemption():
    driver = PoolingDriver(num_blocks=14)
    others = [driver.add([50 + i] * 30, max_tokens=30, ignore_eos=True) for i in range(3)]
    pooled = [driver.add([*PROMPT[:20], i], max_tokens=1, pooling="mean") for i in range(4)]
    driver.run()
    assert all(one.finish_reason is not None for one in (*others, *pooled))
    assert driver.embeddings == {one.request.handle: bytes(range(21)) for one in pooled}


def test_joined_outputs_keep_the_vector():
    """Two outputs of one sequence in one message: what the first said once stays."""
    collector = OutputCollector()
    collector.begin_step(1)
    collector.add_detail(0, TokenOutput(handle=5, token_ids=[1], embedding=b"abcd"))
    collector.begin_step(2)
    collector.add_detail(0, TokenOutput(handle=5, token_ids=[2], finish_reason="length"))
    (output,) = collector.take()[0].details
    assert (output.embedding, output.token_ids) == (b"abcd", [1, 2])
