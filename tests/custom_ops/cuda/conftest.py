"""The kernels on the host shim, each test under several orders of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastengine.custom_ops.cuda import abi, build
from tests.custom_ops.cuda.memory import Kernels


@pytest.fixture(scope="session")
def shim_library() -> Path:
    return build.build_shim_library([Path(__file__).with_name("shim_kernels.cpp")])


@pytest.fixture(scope="session")
def shim(shim_library: Path) -> abi.Operators:
    operators = abi.Operators(shim_library)
    operators.library.fe_shim_set_schedule.argtypes = [ctypes.c_uint64]
    operators.library.fe_shim_error.restype = ctypes.c_char_p
    return operators


@pytest.fixture(params=[1, 17], ids=["reversed", "shuffled"])
def cuda(shim: abi.Operators, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The operators, with the threads of a block running in the reverse and in a random order."""
    shim.library.fe_shim_set_schedule(request.param)
    yield Kernels(shim)
    shim.library.fe_shim_set_schedule(2)
