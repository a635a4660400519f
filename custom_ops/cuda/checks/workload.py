"""What a workload is, and the comparison with its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..abi import DType, Operators
from .memory import Array, Memory

# Of a value around 1, rounded to nearest.
ROUNDING = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class WrongResult(Exception):
    """A kernel's result differs from its reference; the text says where."""


@dataclass(frozen=True)
class Workload:
    """One call of a kernel (or of a few that belong together) with what it should give."""

    launch: Callable[[], None]
    # Raises WrongResult; to be called after one launch.
    check: Callable[[], None]
    num_bytes: int
    operations: int = 0
    # The ceiling it is measured against, and the share of it that is the design target (0: none).
    ceiling: Literal["copy", "matrix"] = "copy"
    target: float = 0.0


@dataclass(frozen=True)
class Bench:
    """The library and the memory that workloads are built with."""

    operators: Operators
    memory: Memory
    rng: np.random.Generator
    stream: int | None = None

    def call(self, name: str, **fields: Any) -> None:
        self.operators.call(name, self.stream, **{key: value.pointer if isinstance(value, Array) else value for key, value in fields.items()})


def code(dtype: str) -> int:
    return int(getattr(DType, dtype))


def require_close(what: str, actual: np.ndarray, expected: np.ndarray, relative: float, absolute: float) -> None:
    """Raises WrongResult naming the worst element, NaN first. Equal infinities are close."""
    if actual.shape != expected.shape:
        raise WrongResult(f"{what}: shape {actual.shape}, expected {expected.shape}")
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.where(actual == expected, 0.0, np.abs(actual - expected) / (absolute + relative * np.abs(expected)))
    excess = np.where(np.isnan(excess), np.inf, excess)
    if excess.size == 0 or excess.max() <= 1.0:
        return
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    count, place = int((excess > 1.0).sum()), [int(i) for i in worst]
    raise WrongResult(f"{what}: {count} of {excess.size} wrong; at {place} {actual[worst]:.7g}, expected {expected[worst]:.7g}")


def require_equal(what: str, actual: np.ndarray, expected: np.ndarray) -> None:
    require_close(what, actual, expected, 0.0, 1e-300)
