"""Runs the tests of the fused step once per instruction set that it has here."""

from __future__ import annotations

import pytest

from fastengine.custom_ops.fused import has_instruction_set
from fastengine.custom_ops.library import Library

INSTRUCTION_SETS = ["avx512", "avxvnni", "avx2"]


def can_run(compiled: Library, name: str) -> bool:
    """Leaves it in use. Also where CPUID hides it, which is why it is asked of a child process."""
    return compiled.force_isa(name) and has_instruction_set(compiled.handle, name)


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, compiled: Library) -> str:
    name: str = request.param
    if not can_run(compiled, name):
        pytest.skip(f"this processor cannot run the fused step of {name}")
    return name
