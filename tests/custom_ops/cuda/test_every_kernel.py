"""Every kernel of the library runs on the host shim against its reference; what launches is read from the shim, not believed."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastengine.custom_ops.cuda import abi, build
from fastengine.custom_ops.cuda.checks import catalogue
from fastengine.custom_ops.cuda.checks.memory import HostMemory
from fastengine.custom_ops.cuda.checks.workload import Bench
from fastengine.custom_ops.cuda.ops import HEAD_SIZES

# Shared memory of a multiprocessor (CUDA C++ Programming Guide, table of compute capabilities): a block has 1 KiB less.
MULTIPROCESSORS = {"80": 164, "89": 100, "90": 228, "100": 228}
ENTRIES = [*catalogue.PROBES, *catalogue.EVERY_KERNEL, *catalogue.WIDE_PROBES, *catalogue.WIDE]


class Launches:
    """The kernels that the shim has launched, by the names that the budget file has for them."""

    def __init__(self, library: Path, operators: abi.Operators):
        self._shim = operators.library
        self._shim.fe_shim_launched.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._shim.fe_shim_launched.restype = ctypes.c_uint64
        symbols = [line.split(" ", 2) for line in build.run(["nm", "-C", str(library)]).splitlines() if re.match(r"[0-9a-f]+ \w ", line)]
        places = {name: int(place, 16) for place, _, name in symbols}
        known = ctypes.cast(self._shim.fe_shim_launched, ctypes.c_void_p).value
        assert known is not None
        base = known - places["fe_shim_launched"]
        self._names = {base + place: build.readable_name(name) for name, place in places.items()}

    def take(self) -> set[str]:
        addresses = (ctypes.c_void_p * 1000)()
        count = self._shim.fe_shim_launched(addresses, len(addresses))
        return {self._names[addresses[i] or 0] for i in range(count)}


@pytest.fixture
def launches(shim_library: Path, shim: abi.Operators) -> Iterator[Launches]:
    shim.library.fe_shim_set_schedule(3)
    yield Launches(shim_library, shim)
    shim.library.fe_shim_set_schedule(2)
    shim.library.fe_shim_set_multiprocessor_shared(228 * 1024)


def run(shim: abi.Operators, entry: catalogue.Entry) -> None:
    rng = np.random.default_rng(11)
    workload = entry.build(Bench(shim, HostMemory(rng), rng))
    workload.launch()
    workload.check()


def test_names_of_entries_tell_them_apart() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.timeout(300)
def test_every_kernel_there_is_runs_and_is_right(shim: abi.Operators, launches: Launches) -> None:
    """On every card's shared memory: with less of it some take other kernels, and on the shim a launch fails that has more."""
    assert MULTIPROCESSORS.keys() == build.ARCHITECTURES.keys()
    launches.take()
    found = set()
    for kib in sorted(set(MULTIPROCESSORS.values()), reverse=True):
        shim.library.fe_shim_set_multiprocessor_shared(kib * 1024)
        for entry in ENTRIES:
            # Elsewhere, those of the largest heads are enough of the attention, and there is no wgmma.
            if kib == 228 or not entry.name.startswith(("paged_attention", "product_probe")) or re.search(r" (192|256)[ /]", entry.name):
                run(shim, entry)
        found |= launches.take()
    # test_compile.py holds the budget file to be the list of what is compiled.
    assert found == set(json.loads(build.BUDGET.read_text())["registers"])


def test_every_kernel_in_the_sources_is_compiled() -> None:
    written = {
        name
        for source in build.kernel_sources()
        for name in re.findall(r"__global__ (?:void )?(?:__launch_bounds__\(.*\) )?(?:void )?(\w+)\(", source.read_text())
    }
    assert written == {name.split("<")[0] for name in json.loads(build.BUDGET.read_text())["registers"]}


def test_the_attention_that_is_promised_is_among_it() -> None:
    """Head sizes, block sizes, caches, windows and sinks: every pair of them."""
    assert catalogue.SIZES == HEAD_SIZES
    seen = set()
    for entry in catalogue.EVERY_KERNEL:
        if entry.name.startswith("paged_attention") and "block_size" in entry.build.keywords:
            heads, blocks = entry.build.keywords["heads"], entry.build.keywords["block_size"]
            choices = {"size": heads.size, "blocks": blocks, "cache": heads.cache, "options": (heads.window, heads.sinks), "group": heads.query}
            seen |= {(a, choices[a], b, choices[b]) for a in choices for b in choices if a < b}
    choices = {
        "size": HEAD_SIZES,
        "blocks": (16, 32, 64),
        "cache": ("bfloat16", "float16", "int8", "fp8"),
        "options": catalogue.OPTIONS,
        "group": (2, 4, 7),
    }
    assert seen == {(a, x, b, y) for a in choices for b in choices if a < b for x in choices[a] for y in choices[b]}
