"""Runs the tests of the compiled operators once per instruction set of this processor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from fastengine import custom_ops
from fastengine.custom_ops.library import Library


@pytest.fixture
def compiled() -> Iterator[Library]:
    """The compiled operators, which use the same instruction set afterwards as before."""
    library = custom_ops._loaded
    if library is None:
        if os.environ.get("FASTENGINE_SKIP_OPS") == "1":
            pytest.skip("installed without the compiled operators")
        pytest.fail("the compiled operators are not built: python custom_ops/setup_ops.py")
    before = library.isa
    yield library
    library.use_isa(before)


@pytest.fixture(params=["avx512", "avx2"])
def isa(request: pytest.FixtureRequest, compiled: Library) -> str:
    name: str = request.param
    if not compiled.use_isa(name):
        pytest.skip(f"this processor has no {name}")
    return name


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
