"""Products with 4- and 8-bit weights (tensor-core instructions emulated) against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fastengine.custom_ops.cuda.abi import DType
from fastengine.custom_ops.cuda.linear import pack_weight
from tests.custom_ops.cuda.memory import Kernels, filled, poisoned

TOLERANCE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Product:
    def __init__(self, rng: np.random.Generator, rows: int, sizes: tuple[int, int], bits: int, group: int, dtype: str, zeros: bool, bias: bool):
        self.rows, (self.in_size, self.out_size), self.bits, self.group, self.dtype = rows, sizes, bits, group, dtype
        self.quantized = rng.integers(0, 2**bits, (self.out_size, self.in_size)).astype(np.uint8)
        groups = (self.in_size // group, self.out_size)
        self.x = filled(rng.normal(size=(rows, self.in_size)), dtype)
        self.scales = filled(rng.uniform(0.5, 2, groups))
        self.zeros = filled(rng.integers(0, 2**bits, groups), "uint8") if zeros else None
        self.bias = filled(rng.normal(size=self.out_size) * 9, dtype) if bias else None
        self.weight = filled(pack_weight(self.quantized, bits), "uint8")

    def run(self, cuda: Kernels, rows: int | None = None) -> np.ndarray:
        rows = self.rows if rows is None else rows
        out = poisoned((rows, self.out_size), self.dtype)
        tensors = {"x": self.x, "weight": self.weight, "scales": self.scales, "zeros": self.zeros, "bias": self.bias, "out": out}
        sizes = {"num_rows": rows, "in_size": self.in_size, "out_size": self.out_size, "group_size": self.group, "bits": self.bits}
        cuda.call("quantized_gemm", **tensors, **sizes, dtype=getattr(DType, self.dtype))
        return out.values

    def expected(self) -> np.ndarray:
        zeros = self.zeros.values.astype(np.float64) if self.zeros else np.full(self.scales.stored.shape, 2.0 ** (self.bits - 1))
        weight = (self.quantized - zeros.repeat(self.group, axis=0).T) * self.scales.values.repeat(self.group, axis=0).T
        return self.x.values @ weight.T + (self.bias.values if self.bias else 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "sizes", "group", "zeros", "bias"),
    [
        (1, (64, 32), 64, False, False),
        (3, (384, 64), 32, True, True),
        (8, (1152, 32), 96, True, False),
        (13, (640, 32), 640, False, True),
        (37, (256, 96), 128, True, True),
    ],
)
def test_matches_float64(
    cuda: Kernels, rng: np.random.Generator, dtype: str, bits: int, rows: int, sizes: tuple[int, int], group: int, zeros: bool, bias: bool
) -> None:
    product = Product(rng, rows, sizes, bits, group, dtype, zeros, bias)
    expected = product.expected()
    np.testing.assert_allclose(product.run(cuda), expected, rtol=TOLERANCE[dtype], atol=2e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_batch(cuda: Kernels, rng: np.random.Generator, bits: int) -> None:
    product = Product(rng, 20, (320, 32), bits, 32, "bfloat16", True, False)
    whole = product.run(cuda)
    for rows in (1, 9):
        np.testing.assert_array_equal(product.run(cuda, rows), whole[:rows])


@pytest.mark.parametrize("change", [{"in_size": 96}, {"out_size": 48}, {"group_size": 48}, {"bits": 3}, {"dtype": DType.float32}])
def test_sizes_without_a_kernel_are_refused(cuda: Kernels, change: dict[str, int]) -> None:
    fields = {"num_rows": 1, "in_size": 192, "out_size": 64, "group_size": 96, "bits": 4, "dtype": DType.bfloat16} | change
    assert cuda.status("quantized_gemm", x=0, weight=0, scales=0, zeros=None, bias=None, out=0, **fields) == -1


@pytest.mark.parametrize(
    ("quantized", "bits", "complaint"),
    [(np.zeros((32, 64), np.uint8), 2, "^bits"), (np.zeros((16, 64), np.uint8), 4, "^quantized"), (np.full((32, 64), 16, np.uint8), 4, "below 16")],
)
def test_weights_that_do_not_fit_are_refused(quantized: np.ndarray, bits: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pack_weight(quantized, bits)
