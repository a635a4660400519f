"""Runs the tests of the compiled operators once per instruction set of this processor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from fastengine import custom_ops


@pytest.fixture(params=["avx512", "avx2"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library = custom_ops._loaded
    if library is None:
        if os.environ.get("FASTENGINE_SKIP_OPS") == "1":
            pytest.skip("installed without the compiled operators")
        pytest.fail("the compiled operators are not built: python custom_ops/setup_ops.py")
    best = library.isa
    if not library.use_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.use_isa(best)


@pytest.fixture
def two_threads(isa: str) -> Iterator[None]:
    library = custom_ops._loaded
    assert library is not None
    before = library.num_threads
    library.set_num_threads(2)
    yield
    library.set_num_threads(before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240917)
