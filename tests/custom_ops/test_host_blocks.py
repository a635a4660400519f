"""Blocks between pools in this process's memory, by the compiled copy and by numpy's."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fastengine import custom_ops
from fastengine.custom_ops.host_blocks import HostBlocks
from fastengine.custom_ops.library import LIBRARY_PATH

LIBRARY = ctypes.CDLL(str(LIBRARY_PATH))
Pools = list[tuple[np.ndarray, np.ndarray]]


def random_pools(rng: np.random.Generator, sizes: list[int], sources: int = 6, targets: int = 5) -> Pools:
    return [tuple(rng.integers(0, 256, (count, size), dtype=np.uint8) for count in (sources, targets)) for size in sizes]


@pytest.mark.parametrize("library", [LIBRARY, None], ids=["compiled", "numpy"])
@pytest.mark.parametrize("sizes", [[16, 4, 24], [100_000] * 4], ids=["small", "over several threads"])
def test_blocks_come_whole_and_nothing_else_changes(library: ctypes.CDLL | None, sizes: list[int], rng: np.random.Generator) -> None:
    pools = random_pools(rng, sizes)
    before = [(source.copy(), target.copy()) for source, target in pools]
    HostBlocks(pools, library).copy(np.array([[5, 0], [2, 3], [5, 4]], np.int32))
    for (source, target), (old_source, old_target) in zip(pools, before, strict=True):
        np.testing.assert_array_equal(source, old_source)
        np.testing.assert_array_equal(target[[0, 3, 4]], old_source[[5, 2, 5]])
        np.testing.assert_array_equal(target[[1, 2]], old_target[[1, 2]])


@pytest.mark.parametrize("library", [LIBRARY, None], ids=["compiled", "numpy"])
def test_within_a_pool(library: ctypes.CDLL | None, rng: np.random.Generator) -> None:
    pool = rng.integers(0, 256, (6, 40), dtype=np.uint8)
    before = pool.copy()
    # A view that is not contiguous, as columns of a plan may be.
    HostBlocks([(pool, pool)], library).copy(np.array([[0, 1, 9], [4, 2, 9]], np.int32)[:, :2])
    np.testing.assert_array_equal(pool, before[[0, 0, 4, 3, 4, 5]])


@pytest.mark.parametrize("library", [LIBRARY, None], ids=["compiled", "numpy"])
@pytest.mark.parametrize("pair", [(6, 0), (0, 5), (-1, 0), (0, -1)])
def test_blocks_that_are_not_there_are_refused(library: ctypes.CDLL | None, pair: tuple[int, int], rng: np.random.Generator) -> None:
    pools = random_pools(rng, [8])
    before = pools[0][1].copy()
    with pytest.raises(ValueError, match=r"pairs: blocks must be in \[0, 6\) and \[0, 5\)"):
        HostBlocks(pools, library).copy(np.array([[0, 0], pair], np.int32))
    np.testing.assert_array_equal(pools[0][1], before)


def test_nothing_to_copy_and_nothing_to_copy_in(rng: np.random.Generator) -> None:
    HostBlocks([], LIBRARY).copy(np.array([[0, 1]], np.int32))
    HostBlocks(random_pools(rng, [8]), LIBRARY).copy(np.empty((0, 2), np.int32))


def test_the_package_binds_the_compiled_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    monkeypatch.setattr(custom_ops, "HostBlocks", lambda pools, library: bound.append(library))
    custom_ops.copies_between([])
    assert bound[0].fastengine_copy_blocks
