"""What each lane of a warp holds of a tensor-core operand, against the tables of the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops.cuda.abi import DType
from tests.custom_ops.cuda.memory import Kernels, encode, filled, rounded


def a_place(lane: int, i: int) -> tuple[int, int]:
    """PTX manual, mma.m16n8k16, operand A: row and column of value a_i."""
    row = lane // 4 if i < 2 or 4 <= i < 6 else lane // 4 + 8
    return row, lane % 4 * 2 + (i & 1) + (0 if i < 4 else 8)


def b_place(lane: int, i: int) -> tuple[int, int]:
    """Operand B: row and column of value b_i."""
    return lane % 4 * 2 + (i & 1) + (0 if i < 2 else 8), lane // 4


def c_place(lane: int, i: int) -> tuple[int, int]:
    """Accumulator: row and column of value c_i."""
    return (lane // 4 if i < 2 else lane // 4 + 8), lane % 4 * 2 + (i & 1)


def run(
    cuda: Kernels, dtype: str, a: np.ndarray, b: np.ndarray, d: np.ndarray, matrices: np.ndarray, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The accumulators [32, 4] and the loaded 16-bit values [32, 8] of one warp."""
    packed = [filled(encode(x, dtype).view(np.int32), "int32") for x in (a, b)]
    sums, loaded = filled(d), filled(np.zeros((32, 4)), "int32")
    bits = filled(matrices.astype(np.uint16).view(np.int16), "int16")
    codes = {"dtype": getattr(DType, dtype), "transposed": int(transposed)}
    cuda.call("fragment_probe", a=packed[0], b=packed[1], matrices=bits, d=sums, loaded=loaded, **codes)
    return sums.values, loaded.stored.view(np.uint16).reshape(32, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_of_fragments_is_the_product_of_matrices(cuda: Kernels, rng: np.random.Generator, dtype: str) -> None:
    a, b, c = rounded(rng.normal(size=(16, 16)), dtype), rounded(rng.normal(size=(16, 8)), dtype), rng.normal(size=(16, 8)).astype(np.float32)
    lanes_a = np.array([[a[a_place(lane, i)] for i in range(8)] for lane in range(32)])
    lanes_b = np.array([[b[b_place(lane, i)] for i in range(4)] for lane in range(32)])
    lanes_c = np.array([[c[c_place(lane, i)] for i in range(4)] for lane in range(32)])
    sums, _ = run(cuda, dtype, lanes_a, lanes_b, lanes_c, np.zeros((4, 8, 8)), False)
    expected = a @ b + c
    np.testing.assert_allclose(sums, [[expected[c_place(lane, i)] for i in range(4)] for lane in range(32)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_loaded_matrices(cuda: Kernels, transposed: bool) -> None:
    """PTX manual, ldmatrix: lane l gets elements 2 (l % 4) and + 1 of row l / 4 of each matrix."""
    matrices = np.arange(4 * 64).reshape(4, 8, 8)
    _, loaded = run(cuda, "float16", np.zeros((32, 8)), np.zeros((32, 4)), np.zeros((32, 4)), matrices, transposed)
    seen = matrices.transpose(0, 2, 1) if transposed else matrices
    expected = [[seen[i // 2, lane // 4, 2 * (lane % 4) + i % 2] for i in range(8)] for lane in range(32)]
    np.testing.assert_array_equal(loaded, expected)
