"""Leaves out one barrier after the other and prints those that no workload notices, a ``file line`` each.

    python barrier_mutants.py SHIM_LIBRARY SCRIPTS_FOLDER

A process of its own, without Paddle: a kernel without a barrier may follow a wild index, and then its process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCHEDULES = (1, 0, 17, 18)
# The second is an emulated card whose kernels take other paths for want of memory.
SHARED_BYTES = (228 * 1024, 100 * 1024)
LIMIT_S = 30
# A workload by its name (across processes: by its number), the threads' schedule, and the card's shared memory.
Case = tuple[str, int, int]
CASE = struct.Struct("QQQ")
# Which workloads run a file's kernels; all of them those of the other files. One too few shows: a barrier goes unnoticed.
USERS: dict[str, str | tuple[str, ...]] = {
    "attention_decode.cu": "paged_attention",
    "attention_prefill.cu": "paged_attention",
    "attention_prefill_wgmma.cu": "paged_attention by wgmma",
    "attention_tile.h": "paged_attention",
    "product_probe_wgmma.cu": "product_probe",
    "attention_mla.cu": "mla_decode",
    "attention_plan.cu": "attention_plan",
    "fragment_probe.cu": "fragment_probe",
    "logits.cu": ("log_softmax_gather", "apply_penalties"),
    "moe.cu": "moe",
    "quantized_gemm.cu": "quantized_gemm",
    "reduce.h": ("rms_norm", "log_softmax_gather"),
    "rotary.cu": "rotary",
    "sample.cu": ("argmax", "sample"),
    "select.h": ("sample", "log_softmax_gather"),
}


def barriers(kernels: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(kernels.rglob("*")):
        if path.suffix in (".cu", ".h"):
            for number, text in enumerate(path.read_text().splitlines(), 1):
                if re.match(r"[^/]*\b__sync(threads|warp)\(\);", text):
                    yield path.name, number


def entries(part: Any) -> list[Any]:
    """The tiny workloads, and sizes at which blocks repeat themselves and several pieces, tiles and warps meet."""
    catalogue, attention = part("checks.catalogue"), part("checks.attention")
    elementwise, linear, logits = (part(f"checks.{name}") for name in ("elementwise", "linear", "logits"))
    entry = catalogue.make_entry
    return [
        *catalogue.PROBES,
        *catalogue.TINY,
        *catalogue.WIDE_PROBES[:4],
        *catalogue.WIDE,
        entry(elementwise.rms_norm, "wide", rows=2, size=2048, dtype="float32", residual=False),
        entry(attention.attention_plan, "many", seqs=1100, heads=3, window=0),
        entry(attention.paged_attention, "pieces", heads=attention.Heads(2, 1, 64, 64), lengths=[1, 1, 1], contexts=[700, 300, 90]),
        entry(attention.paged_attention, "tiles", heads=attention.Heads(3, 1, 192, 128), lengths=[90, 1], contexts=[200, 9]),
        entry(attention.mla_decode, "pieces", heads=2, contexts=[600, 300, 90], dtype="bfloat16"),
        entry(logits.log_softmax_gather, "many", rows=2, vocab=3000, k=40),
        entry(logits.sample, "many", rows=12, vocab=3000),
        entry(linear.moe_permute, "many", tokens=200, experts=4, top_k=2, align=4),
    ]


class Mutants:
    def __init__(self, library: Path, part: Any):
        self._abi, self._memory, self._workload = part("abi"), part("checks.memory"), part("checks.workload")
        self._operators = self._abi.Operators(library)
        self._library = self._operators.library
        self._library.fe_shim_skip_barrier.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self._library.fe_shim_set_schedule.argtypes = [ctypes.c_uint64]
        self._library.fe_shim_skipped.restype = ctypes.c_uint64

    def is_right(self, entry: Any, schedule: int) -> bool:
        rng = np.random.default_rng(5 + schedule)
        self._library.fe_shim_set_schedule(schedule)
        try:
            workload = entry.build(self._workload.Bench(self._operators, self._memory.HostMemory(rng), rng))
            workload.launch()
            workload.check()
        except (self._workload.WrongResult, self._abi.OperatorError):
            return False
        return True

    def noticed_by(self, users: list[Any], barrier: tuple[str, int]) -> Case | None:
        """Runs everything that comes by the barrier without it, up to what is wrong then."""
        case = mmap.mmap(-1, CASE.size)  # where the child is, which may not live to tell
        if self._in_child(lambda: self._all_right(users, barrier, case)):
            return None
        number, schedule, shared_bytes = CASE.unpack(case[:])
        return users[number].name, schedule, shared_bytes

    def _all_right(self, users: list[Any], barrier: tuple[str, int], case: mmap.mmap) -> bool:
        for shared_bytes in SHARED_BYTES if barrier[0].startswith("attention_") else SHARED_BYTES[:1]:
            self._library.fe_shim_set_multiprocessor_shared(shared_bytes)
            for number, entry in enumerate(users):
                if shared_bytes != SHARED_BYTES[0] and entry.name.startswith("product_probe"):
                    continue  # the second card has no wgmma
                self._library.fe_shim_skip_barrier(barrier[0].encode(), barrier[1])
                for schedule in SCHEDULES:
                    case[:] = CASE.pack(number, schedule, shared_bytes)
                    if not self.is_right(entry, schedule):
                        return False
                    if not self._library.fe_shim_skipped():
                        break
        return True

    def are_right_with_all_barriers(self, chosen: list[Any], cases: set[Case]) -> bool:
        def all_right() -> bool:
            for entry in chosen:
                for name, schedule, shared_bytes in cases:
                    if name == entry.name:
                        self._library.fe_shim_set_multiprocessor_shared(shared_bytes)
                        if not self.is_right(entry, schedule):
                            return False
            return True

        return self._in_child(all_right)

    @staticmethod
    def _in_child(is_right: Callable[[], bool]) -> bool:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            os._exit(0 if is_right() else 1)
        return os.waitpid(child, 0)[1] == 0


def main() -> int:
    library, scripts = map(Path, sys.argv[1:])
    sys.path.insert(0, str(scripts))
    part = importlib.import_module("gpu_check").part
    mutants, chosen = Mutants(library, part), entries(part)
    cases: set[Case] = set()
    for barrier in barriers(part("build").KERNELS):
        users = [entry for entry in chosen if entry.name.startswith(USERS.get(barrier[0], ""))]
        case = mutants.noticed_by(users, barrier)
        if case is None:
            print(*barrier)
        else:
            cases.add(case)
    # What noticed a barrier that is missing must have nothing to say when all are there.
    if not mutants.are_right_with_all_barriers(chosen, cases):
        print("wrong with all barriers")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
