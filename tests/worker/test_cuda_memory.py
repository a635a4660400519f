"""How many KV blocks a GPU gets: the formula, and the steps that are run to fill it in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from fastengine.worker.cuda_memory import (
    BYTES_PER_GRAPH,
    GIB,
    MemoryFigures,
    PaddleDeviceMemory,
    StepLimits,
    decode_arrays,
    kv_budget,
    prefill_arrays,
)
from tests.worker.cuda_fakes import FakeDevice, FakeMemory, cuda_host

LIMITS = StepLimits(max_num_seqs=3, max_num_batched_tokens=100, max_model_len=40, block_size=16)


def gib(**figures: float) -> MemoryFigures:
    return MemoryFigures(**{name: int(value * GIB) for name, value in figures.items()})


@pytest.mark.parametrize(
    ("figures", "utilization", "graphs", "expected"),
    [
        # All of a card's share but what the steps took.
        (gib(total=80, free=64, reserved=16, peak_reserved=18), 0.9, 0.0, 72 - 18),
        # 2 GiB of context, libraries and other processes are outside of Paddle.
        (gib(total=80, free=62, reserved=16, peak_reserved=18), 0.9, 1.5, 72 - 2 - 18 - 1.5),
        # Another process took most of it.
        (gib(total=80, free=4, reserved=16, peak_reserved=16), 0.9, 0.0, 72 - 60 - 16),
        # The driver and Paddle may count differently by a little: nothing outside is nothing.
        (gib(total=80, free=65, reserved=16, peak_reserved=16), 1.0, 0.0, 64),
    ],
)
def test_the_formula(figures: MemoryFigures, utilization: float, graphs: float, expected: float) -> None:
    assert kv_budget(figures, utilization, int(graphs * GIB)) == pytest.approx(expected * GIB, abs=2)


def test_the_largest_prefill_has_all_tokens_in_sequences_as_long_as_they_may_be() -> None:
    arrays = prefill_arrays(LIMITS)
    assert arrays.context_lens.tolist() == [40, 40, 20]
    assert arrays.query_starts.tolist() == [0, 40, 80, 100]
    assert arrays.positions.tolist() == [*range(40), *range(40), *range(20)]
    assert arrays.block_tables.shape == (3, 3)
    assert (arrays.slot_mapping == -1).all()
    assert all(array.dtype == np.int32 for array in arrays)
    few = prefill_arrays(StepLimits(max_num_seqs=2, max_num_batched_tokens=100, max_model_len=40, block_size=16))
    assert few.context_lens.tolist() == [40, 40]
    assert prefill_arrays(StepLimits(4, 8, 4096, 16)).context_lens.tolist() == [8]


def test_the_largest_decode_has_tables_of_full_width() -> None:
    arrays = decode_arrays(LIMITS, 3)
    assert arrays.block_tables.shape == (3, 3)
    assert arrays.context_lens.tolist() == [1, 1, 1]
    assert arrays.positions.tolist() == [0, 0, 0]


def test_a_worker_measures_and_counts_blocks(golden: Path) -> None:
    """Weights 1 MiB; the decode step alone takes another, all steps together three; 2 MiB are outside."""
    mib = 1 << 20
    before, decode, all_steps = (MemoryFigures(56 * mib, 52 * mib, 2 * mib, peak) for peak in (2 * mib, 3 * mib, 5 * mib))
    memory, device = FakeMemory(before, decode, all_steps), FakeDevice()
    shapes = []
    host = cuda_host(golden / "llama", device, memory=memory, max_capture_batch_size=2, max_num_batched_tokens=64, gpu_memory_utilization=0.75)
    assert host.model is not None
    inner = host.model.forward

    def recorded(inputs: object, cache: object) -> paddle.Tensor:
        shapes.append(tuple(inputs.token_ids.shape))  # type: ignore[attr-defined]
        return inner(inputs, cache)  # type: ignore[arg-type]

    host.model.forward = recorded  # type: ignore[method-assign]
    # 42 - 2 outside - 5 peak - (1 + 2 graphs * 8 MiB each)
    budget = 42 * mib - 2 * mib - 5 * mib - (1 * mib + 2 * BYTES_PER_GRAPH)
    assert host.num_blocks_that_fit() == budget // host.kv_shape().bytes_per_block
    assert memory.started == 1
    assert shapes == [(2,), (64,), (40,)]


def test_a_card_without_room_has_no_blocks(golden: Path) -> None:
    host = cuda_host(golden / "llama", FakeDevice(), memory=FakeMemory(MemoryFigures(GIB, 0, 0, 0)))
    assert host.num_blocks_that_fit() == 0


def test_a_size_that_was_asked_for_is_not_measured(golden: Path) -> None:
    memory = FakeMemory()
    host = cuda_host(golden / "llama", FakeDevice(), memory=memory, kv_cache_memory_gib=0.001)
    assert host.num_blocks_that_fit() == int(0.001 * GIB) // host.kv_shape().bytes_per_block
    assert memory.started == 0


def test_what_paddle_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is waited for first, and the driver's order (free, total) is not mixed up."""
    calls: list[str] = []
    for name in ("empty_cache", "reset_max_memory_reserved"):
        monkeypatch.setattr(paddle.device.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(paddle.device, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(paddle.cuda, "mem_get_info", lambda: (30, 80))
    monkeypatch.setattr(paddle.device.cuda, "memory_reserved", lambda: 5)
    monkeypatch.setattr(paddle.device.cuda, "max_memory_reserved", lambda: 9)
    memory = PaddleDeviceMemory()
    memory.start()
    assert calls == ["synchronize", "empty_cache", "reset_max_memory_reserved"]
    assert memory.figures() == MemoryFigures(total=80, free=30, reserved=5, peak_reserved=9)
    assert calls[-1] == "synchronize"
