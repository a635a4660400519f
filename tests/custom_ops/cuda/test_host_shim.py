"""The host shim itself: right kernels give right results, and mistakes show."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from fastengine.custom_ops.cuda import abi

THREADS = 64
FAILED = -2
ORDERS = [0, 1, 2, 3, 4]
NEXT = np.roll(np.arange(THREADS), -1)
NEXT_IN_WARP = np.arange(THREADS).reshape(2, 32)[:, np.roll(np.arange(32), -1)].reshape(-1)


class Shim:
    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def run(self, name: str, order: int) -> tuple[int, np.ndarray, str]:
        self.library.fe_shim_set_schedule(order)
        out = np.full(THREADS, -7, dtype=np.int32)
        status = getattr(self.library, f"fe_test_{name}")(out.ctypes.data_as(ctypes.c_void_p))
        return status, out, self.library.fe_shim_error().decode()


@pytest.fixture
def threads(shim: abi.Operators) -> Shim:
    return Shim(shim.library)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pass_with_barrier", NEXT),
        ("pass_within_warp_with_barrier", NEXT_IN_WARP),
        ("rotation_with_both_barriers", np.roll(np.arange(THREADS), -5)),
        ("block_sum", np.full(THREADS, THREADS * (THREADS - 1) // 2)),
        ("shuffles_of_separate_groups", np.concatenate([32 * w + np.r_[np.roll(np.arange(8), -3), 8 + np.roll(np.arange(24), -1)] for w in (0, 1)])),
    ],
)
def test_a_right_kernel_gives_its_result_in_every_order(threads: Shim, name: str, expected: np.ndarray, order: int) -> None:
    status, out, error = threads.run(name, order)
    assert (status, error) == (0, "")
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pass_without_barrier", NEXT),
        ("pass_within_warp_without_barrier", NEXT_IN_WARP),
        ("rotation_with_one_barrier", np.roll(np.arange(THREADS), -5)),
    ],
)
def test_a_missing_barrier_gives_a_wrong_result_in_some_order(threads: Shim, name: str, expected: np.ndarray) -> None:
    wrong = 0
    for order in ORDERS:
        status, out, _ = threads.run(name, order)
        assert status == 0
        wrong += not np.array_equal(out, expected)
    assert wrong >= 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("barrier_for_half", "divergent barrier: 32 threads ended, 32 threads wait at the block barrier .*shim_kernels.cpp"),
        ("two_different_barriers", "divergent barrier: 32 threads wait at the block barrier .*, 32 threads wait at the block barrier"),
        ("shuffle_without_everybody", "divergent barrier: 2 threads ended, 62 threads wait in __shfl_xor_sync"),
        ("shuffle_from_outside_the_mask", "__shfl_sync: lane 0 reads a lane outside the mask"),
        ("shuffle_while_others_are_at_the_barrier", "32 threads wait at the block barrier .*, 32 threads wait in __syncwarp"),
    ],
)
def test_divergence_fails_with_a_message(threads: Shim, name: str, message: str, order: int) -> None:
    status, _, error = threads.run(name, order)
    assert status == FAILED
    assert re.search(message, error), error


def test_a_launch_works_after_one_that_failed(threads: Shim) -> None:
    assert threads.run("barrier_for_half", 2)[0] == FAILED
    assert threads.run("pass_with_barrier", 2)[0] == 0


def test_shared_memory_starts_poisoned_in_every_block(threads: Shim) -> None:
    for _ in range(2):
        assert (threads.run("uninitialised_shared", 2)[1] == -1).all()


def test_asynchronous_copies_arrive_when_waited_for(threads: Shim) -> None:
    given = np.arange(THREADS, dtype=np.int32)
    masked = np.where(given // 4 == 1, 0, given)[::-1]
    pointer = given.ctypes.data_as(ctypes.c_void_p)
    results = {}
    for waits in (1, 0):
        results[waits] = np.empty(THREADS, dtype=np.int32)
        assert threads.library.fe_test_copy(pointer, results[waits].ctypes.data_as(ctypes.c_void_p), waits) == 0
    np.testing.assert_array_equal(results[1], masked)
    assert (results[0] == -1).any()
    assert threads.library.fe_test_copy_under_way(pointer) == FAILED
    assert "nobody waited for" in threads.library.fe_shim_error().decode()


def test_every_block_of_a_grid_runs_once(threads: Shim) -> None:
    out = np.zeros(13, dtype=np.int32)
    assert threads.library.fe_test_grid(out.ctypes.data_as(ctypes.c_void_p)) == 0
    assert out.tolist() == [1] * 12 + [12]
    assert threads.library.fe_test_no_threads(out.ctypes.data_as(ctypes.c_void_p)) == FAILED


def test_a_launch_that_no_card_would_make_fails(threads: Shim) -> None:
    """Axes of a grid past their limits, empty ones, and more shared memory than a block may have, static and dynamic together."""
    library, out = threads.library, np.zeros(THREADS, dtype=np.int32)
    pointer = out.ctypes.data_as(ctypes.c_void_p)
    library.fe_test_blocks.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 3]
    for blocks in ((1, 65536, 1), (1, 1, 65536), (2**31, 1, 1), (0, 1, 1), (1, 0, 1)):
        assert library.fe_test_blocks(pointer, *blocks) == FAILED
        assert " x ".join(map(str, blocks)) in library.fe_shim_error().decode()
    library.fe_test_shared.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    library.fe_shim_set_multiprocessor_shared(100 * 1024)
    try:
        for dynamic, much, status in ((98 * 1024, 0, 0), (98 * 1024 + 1, 0, FAILED), (100 * 1024, 0, FAILED), (0, 1, FAILED)):
            assert library.fe_test_shared(pointer, dynamic, much) == status
            assert ("bytes of shared memory and may have 101376" in library.fe_shim_error().decode()) == (status == FAILED)
    finally:
        library.fe_shim_set_multiprocessor_shared(228 * 1024)


MISTAKES = [
    "none",
    "reads what was copied and not published",
    "registers that nothing orders before it",
    "waits for products that were not committed",
    "ends with matrix products that nobody waited for",
    "early read",
    "early overwrite",
    "registers reused",
    "an operand outside of shared memory",
]


def products(threads: Shim, mistake: str) -> list[tuple[int, np.ndarray, str]]:
    """Status, sums and error under every order."""
    ones, results = np.full(8, 0x3F80, np.uint16), []
    for order in range(8):
        threads.library.fe_shim_set_schedule(order)
        out = np.zeros(128, np.float32)
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (ones, out))
        status = threads.library.fe_test_product(*pointers, MISTAKES.index(mistake))
        results.append((status, out, threads.library.fe_shim_error().decode()))
    return results


def test_products_of_a_warpgroup_are_right_when_waited_for(threads: Shim) -> None:
    for status, out, error in products(threads, "none"):
        assert (status, error) == (0, "")
        assert (out == 16).all()


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if " " in m and not m.startswith(("early", "registers reused"))])
def test_products_that_hardware_would_not_order_fail(threads: Shim, mistake: str) -> None:
    for status, _, error in products(threads, mistake):
        assert status == FAILED
        assert mistake in error


def test_products_touched_before_they_are_waited_for_show(threads: Shim) -> None:
    """Sums are no numbers until then, and operands may be read until then: memory by other warps, registers unless all compute at once."""
    assert all(np.isnan(out).all() for _, out, _ in products(threads, "early read"))
    assert not any((out == 16).all() for _, out, _ in products(threads, "early overwrite"))
    right = [bool((out == 16).all()) for _, out, _ in products(threads, "registers reused")]
    assert right == [True] + [False] * 7
