"""Captured decode steps: buckets, padding, fixed addresses, and what becomes of them when memory moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from fastengine.worker.batch import PersistentBatch, StepArrays, StepRows
from fastengine.worker.cuda_forward import CudaSteps, ForwardPass
from fastengine.worker.cuda_graphs import NOT_STORED, Bucket, DecodeGraphs, capture_sizes
from fastengine.worker.sleeping import Sleeper
from fastengine.worker.step_inputs import StepInputs
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.cuda_fakes import FakeDevice, cuda_host
from tests.worker.driver import Request
from tests.worker.models import BLOCK_SIZE, NUM_BLOCKS
from tests.worker.test_runner import mixed_requests

WIDTH = 5


def decodes(count: int, width: int = 3, seed: int = 0) -> StepArrays:
    rng = np.random.default_rng(seed)
    one_each = (rng.integers(0, 99, count).astype(np.int32) for _ in range(3))
    tables = rng.integers(0, 50, (count, width)).astype(np.int32)
    return StepArrays(*one_each, np.arange(count + 1, dtype=np.int32), rng.integers(1, 20, count).astype(np.int32), tables)


def contents(bucket: Bucket) -> StepArrays:
    return StepArrays(*(tensor.numpy() for tensor in bucket.tensors))


def test_sizes_end_with_the_largest_and_waste_little() -> None:
    assert capture_sizes(0) == []
    assert capture_sizes(1) == [1]
    assert capture_sizes(11) == [1, 2, 4, 8, 11]
    for largest in (64, 100, 512, 700):
        sizes = np.array(capture_sizes(largest))
        assert sizes[-1] == largest
        batches = np.arange(64, largest + 1)
        padded = sizes[np.searchsorted(sizes, batches)]
        assert ((padded - batches) / padded <= 1 / 8).all()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_bucket_holds_the_batch_and_harmless_padding(size: int) -> None:
    bucket = Bucket(size, WIDTH)
    addresses = [tensor.data_ptr() for tensor in bucket.tensors]
    assert all(address % 16 == 0 for address in addresses)
    for count in (size, 1, (size + 1) // 2):
        arrays = decodes(count, seed=count)
        bucket.fill(arrays)
        held = contents(bucket)
        for name in ("token_ids", "positions", "slot_mapping", "context_lens"):
            np.testing.assert_array_equal(getattr(held, name)[:count], getattr(arrays, name))
        np.testing.assert_array_equal(held.block_tables[:count, :3], arrays.block_tables)
        np.testing.assert_array_equal(held.query_starts, np.arange(size + 1))
        assert (held.slot_mapping[count:] == NOT_STORED).all()
        assert (held.context_lens[count:] == 1).all()
        for padding in (held.token_ids[count:], held.positions[count:], held.block_tables[count:, 0]):
            assert not padding.any()
        assert [tensor.data_ptr() for tensor in bucket.tensors] == addresses


def sums(tensors: tuple[paddle.Tensor, ...]) -> paddle.Tensor:
    """A forward pass of sorts: each row's hidden state depends on all that the row has."""
    arrays = StepArrays(*tensors)
    columns = [arrays.token_ids, arrays.positions, arrays.slot_mapping, arrays.context_lens, arrays.block_tables[:, 0]]
    return paddle.stack([column.astype("float32") for column in columns], axis=1)


def graphs_of(device: FakeDevice, sizes: list[int]) -> DecodeGraphs:
    return DecodeGraphs(device.wrap(sums), sizes, WIDTH, device.new_graph, device.synchronize)


def test_each_batch_replays_the_smallest_graph_that_holds_it() -> None:
    device = FakeDevice()
    graphs = graphs_of(device, [4, 1, 2])
    assert not graphs.covers(1)
    graphs.capture()
    captured = device.graphs[:]  # of 4, 2 and 1: the largest sizes the pool
    assert [graph.call[2].shape[0] for graph in captured if graph.call is not None] == [4, 2, 1]
    assert graphs.covers(4)
    assert not graphs.covers(5)
    for count, replayed in ((1, 2), (2, 1), (3, 0), (4, 0), (2, 1)):
        before = [graph.replays for graph in captured]
        arrays = decodes(count, seed=10 + count)
        hidden = graphs.run(arrays)
        np.testing.assert_array_equal(hidden.numpy(), sums(tuple(paddle.to_tensor(a) for a in arrays)).numpy())
        assert [graph.replays - was for graph, was in zip(captured, before, strict=True)] == [int(i == replayed) for i in range(3)]
    assert device.graphs == captured


def test_released_graphs_are_reset_and_captured_anew() -> None:
    device = FakeDevice()
    graphs = graphs_of(device, [1, 2])
    graphs.capture()
    graphs.release()
    assert all(graph.call is None for graph in device.graphs)
    assert not graphs.covers(1)
    graphs.capture()
    graphs.capture()  # nothing is missing
    assert len(device.graphs) == 4
    assert graphs.covers(2)


def test_a_capture_that_fails_names_the_batch_and_the_way_around() -> None:
    def refuse(tensors: tuple[paddle.Tensor, ...]) -> paddle.Tensor:
        if tensors[0].shape[0] == 2 and device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return sums(tensors)

    device = FakeDevice()
    graphs = DecodeGraphs(refuse, [1, 2], WIDTH, device.new_graph, device.synchronize)
    with pytest.raises(RuntimeError, match=r"2 sequences could not be captured .*--max-capture-batch-size 0.* stream is capturing"):
        graphs.capture()


# ---- in a worker -----------------------------------------------------------------------------------------


def replays(device: FakeDevice) -> int:
    return sum(graph.replays for graph in device.graphs)


@pytest.mark.parametrize("largest", [40, 5, 0])
def test_a_worker_with_graphs_gives_the_tokens_of_one_without(golden: Path, largest: int) -> None:
    """Mixed steps and batches past the largest graph run kernel by kernel, all others as graphs."""
    expected = mixed_requests(256, 16)
    driver_of(loaded_host(golden / "llama")).run(expected)
    device = FakeDevice()
    host = cuda_host(golden / "llama", device, max_capture_batch_size=largest)
    host.init_cache(NUM_BLOCKS, 0)
    assert len(device.graphs) == len(capture_sizes(largest))
    requests = mixed_requests(256, 16)
    driver_of(host).run(requests)
    assert [r.output for r in requests] == [r.output for r in expected]
    assert (replays(device) > 0) == (largest > 0)


def test_steady_decode_runs_as_graphs_alone_and_padding_stores_nothing(golden: Path) -> None:
    device = FakeDevice()
    host = cuda_host(golden / "llama", device, max_capture_batch_size=8)
    host.init_cache(NUM_BLOCKS, 0)
    assert host.cache is not None
    eager_before = device.eager_calls
    requests = [Request(list(range(3, 10)), 12, arrival_step=0) for _ in range(5)]
    # Only the driver's own blocks may change: padding must not write to any other, block 0 included.
    driver_of(host, num_blocks=40).run(requests)
    assert device.eager_calls == eager_before + 1  # the prefill
    assert replays(device) == 11
    written = [block for block in range(NUM_BLOCKS) if host.cache.layers[0].key.tensor[block].abs().sum().item() > 0]
    assert 0 < len(written) <= 5 * -(-19 // BLOCK_SIZE)


def test_graphs_follow_the_memory_through_sleep_and_a_new_cache(golden: Path) -> None:
    device = FakeDevice()
    host = cuda_host(golden / "llama", device, max_capture_batch_size=4)
    host.init_cache(NUM_BLOCKS, 0)
    prompt = list(range(5, 25))
    before = driver_of(host).run([Request(prompt, 9)])[0].output
    first = device.graphs[:]

    sleeper = Sleeper(host, lambda: None)
    sleeper.sleep(["weight", "kv_cache"])
    assert all(graph.call is None for graph in first)
    sleeper.wakeup(["weight"])
    assert len(device.graphs) == len(first)  # the cache still sleeps
    sleeper.wakeup(["kv_cache"])
    assert len(device.graphs) == 2 * len(first)
    assert driver_of(host).run([Request(prompt, 9)])[0].output == before

    host.init_cache(NUM_BLOCKS // 2, 0)
    assert all(graph.call is None for graph in device.graphs[: 2 * len(first)])
    assert driver_of(host, NUM_BLOCKS // 2).run([Request(prompt, 9)])[0].output == before
    assert sum(graph.replays for graph in device.graphs[2 * len(first) :]) == 8


def test_blocks_that_there_are_not_never_reach_the_operators(golden: Path) -> None:
    host = cuda_host(golden / "llama", FakeDevice(), max_capture_batch_size=0)
    host.init_cache(4, 0)
    with pytest.raises(ValueError, match=r"blocks outside of \[0, 4\)"):
        driver_of(host, num_blocks=400).run([Request(list(range(3, 60)), 2)])


def test_positions_past_the_rotary_table_read_its_last_row() -> None:
    """The operators look at no index."""
    seen = []

    class Recorder:
        def forward(self, inputs: StepInputs, cache: object) -> paddle.Tensor:
            seen.append(inputs.positions.tolist())
            return paddle.zeros([2, 1])

        def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
            return hidden

    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=100)
    batch.num_tokens[:], batch.num_blocks[:], batch.occupied[:] = 20, 8, True
    steps = CudaSteps(ForwardPass(Recorder(), None), SimpleNamespace(num_blocks=1), batch, max_position=12, graphs=None)
    one = np.ones(2, np.int32)
    steps(StepRows(np.array([0, 1], np.int32), np.array([11, 12], np.int32), one, 2))
    assert seen == [[11, 11]]
