from __future__ import annotations

import numpy as np
import pytest

from fastengine import custom_ops as ops
from fastengine.custom_ops import reference
from tests.custom_ops.helpers import assert_close, assert_identical, tensor

SHAPES = [(1, 576), (5, 577), (0, 64), (300, 2048), (3, 1), (2, 3, 64), (7, 9, 20)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
def test_rms_norm(rng: np.random.Generator, shape: tuple[int, ...], magnitude: float) -> None:
    x, weight = tensor(rng.normal(size=shape) * magnitude), tensor(rng.normal(size=shape[-1]))
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_changes_the_residual(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x, weight, start = tensor(rng.normal(size=shape)), tensor(rng.normal(size=shape[-1])), rng.normal(size=shape)
    residual, expected = tensor(start), tensor(start)
    assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, expected, weight, 1e-5))
    assert_identical(residual, expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(1, 3072), (5, 2), (64, 1540), (0, 8), (3, 26)], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_silu_mul(rng: np.random.Generator, shape: tuple[int, int], magnitude: float) -> None:
    gate_up = tensor(rng.normal(size=shape) * magnitude)
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.usefixtures("two_threads")
def test_row_alone_equals_row_in_a_batch(rng: np.random.Generator) -> None:
    x, weight = tensor(rng.normal(size=(500, 576))), tensor(rng.normal(size=576))
    normed, gated = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x)
    for r in (0, 250, 499):
        assert_identical(ops.rms_norm(x[r : r + 1], weight, 1e-6)[0], normed[r])
        assert_identical(ops.silu_mul(x[r : r + 1])[0], gated[r])
    ops.set_num_threads(1)
    assert_identical(ops.rms_norm(x, weight, 1e-6), normed)


@pytest.mark.usefixtures("isa")
def test_a_view_is_read_by_its_strides(rng: np.random.Generator) -> None:
    wide = tensor(rng.normal(size=(4, 96)))
    view, weight = wide[:, 16:80], tensor(np.ones(64))
    assert_identical(ops.rms_norm(view, weight, 1e-6), ops.rms_norm(view.clone().contiguous(), weight, 1e-6))


@pytest.mark.usefixtures("isa")
def test_bad_arguments_name_the_argument() -> None:
    x = tensor(np.zeros((2, 8)))
    for module in (ops, reference):
        with pytest.raises(ValueError, match=r"^weight: "):
            module.rms_norm(x, tensor(np.zeros(7)), 1e-6)
        with pytest.raises(ValueError, match=r"^x: "):
            module.rms_norm(tensor(np.zeros((2, 8)), "int32"), tensor(np.zeros(8)), 1e-6)
        with pytest.raises(ValueError, match=r"^residual: "):
            module.add_rms_norm(x, tensor(np.zeros((3, 8))), tensor(np.zeros(8)), 1e-6)
        with pytest.raises(ValueError, match=r"^gate_up: "):
            module.silu_mul(tensor(np.zeros((2, 7))))
    with pytest.raises(ValueError, match=r"^residual: .*contiguous"):
        ops.add_rms_norm(x, tensor(np.zeros((2, 16)))[:, :8], tensor(np.zeros(8)), 1e-6)
