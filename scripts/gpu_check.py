#!/usr/bin/env python3
"""Prove the CUDA operators on a GPU: numbers against float64, speed against what the card can do.

    python scripts/gpu_check.py [--output report.md]

Needs Python, numpy, nvcc and PyTorch with CUDA, no Paddle; from a checkout, nothing installed. In order: builds the C
library for this card, checks the tensor-core fragments, checks every kernel on fresh random inputs with poisoned
outputs, measures the card's ceilings, times the kernels. Every part has a share of the time budget (8 minutes by
default); what did not fit is named.

Exit status: 0 all right, 1 a wrong result or a failed build, 2 no GPU (or no PyTorch, no nvcc), 3 a missed target.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import numpy as np
except ImportError:
    # PyTorch installs without it.
    print("gpu_check: numpy is missing: pip install numpy", flush=True)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fastengine_cuda"
RIGHT, WRONG, NO_GPU, MISSED_TARGET = range(4)
# Shares of the time budget.
BUILD_SHARE, CHECK_SHARE, CEILING_SHARE = 0.5, 0.75, 0.8


class NotHere(Exception):
    """Something that this needs is missing; the text says what."""


def load_package() -> None:
    """custom_ops/cuda as a package of its own: importing fastengine.custom_ops would want Paddle."""
    if PACKAGE in sys.modules:
        return
    folder = ROOT / "custom_ops" / "cuda"
    spec = importlib.util.spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def part(name: str) -> Any:
    """A module of custom_ops/cuda."""
    load_package()
    return importlib.import_module(f"{PACKAGE}.{name}")


@dataclass
class Clock:
    """The time budget and what did not fit into it."""

    budget_s: float
    now: Callable[[], float] = time.monotonic
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = self.now()

    def elapsed_s(self) -> float:
        return self.now() - self._start

    def allows(self, name: str, share: float) -> bool:
        """Whether the share of the budget up to here has time left; else notes ``name`` as skipped."""
        if self.elapsed_s() < self.budget_s * share:
            return True
        self.skipped.append(name)
        return False


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    seconds: float
    num_bytes: int
    operations: int
    ceiling: str
    share: float  # of the ceiling; 0 if that was not measured
    target: float

    @property
    def misses(self) -> bool:
        return 0 < self.share < self.target

    def text(self) -> str:
        achieved = (
            f"{self.operations / self.seconds / 1e12:.0f} TFLOP/s" if self.ceiling == "matrix" else f"{self.num_bytes / self.seconds / 1e9:.0f} GB/s"
        )
        share = f"{self.share:.0%} of {self.ceiling}" if self.share else "-"
        target = "-" if not self.target else f"{self.target:.0%}" + (" MISSED" if self.misses else "")
        return f"| {self.name} | {self.seconds * 1e6:.1f} | {achieved} | {share} | {target} |"


HEADER = "| kernel | us | achieved | share of ceiling | target |\n|---|---|---|---|---|"
BESIDE_HEADER = "| the same attention | |\n|---|---|"


@dataclass
class Device:
    """Where the checks run: the shim on the host, or a GPU."""

    name: str
    bench: Any
    # "check" and "speed" -> catalogue entries; "wide check" and "wide speed": of what is used only once these went right
    entries: dict[str, Sequence[Any]]
    repeats: int
    measure_ceilings: Callable[[], dict[str, float]]  # ceiling -> per second
    baselines: Callable[[str], list[str]]  # of a catalogue entry: others' times, if there are any


def run_entry(device: Device, entry: Any) -> str | None:
    """Builds, launches and checks one workload; what is wrong with it, or None."""
    try:
        workload = entry.build(device.bench)
        workload.launch()
        device.bench.memory.synchronize()
        workload.check()
    except (part("checks.workload").WrongResult, part("abi").OperatorError, RuntimeError) as error:
        return f"{entry.name}: {error}"
    return None


def run_checks(device: Device, clock: Clock, report: Callable[[str], None]) -> bool:
    """True if every result that there was time for is right. Wrong fragments end it: nothing on tensor cores can be right then."""
    for entries, is_last_word in ((part("checks.catalogue").PROBES, True), (device.entries["check"], False)):
        wrong = []
        for entry in entries:
            if not clock.allows(f"check of {entry.name}", CHECK_SHARE):
                continue
            problem = run_entry(device, entry)
            report(f"- {'WRONG: ' + problem if problem else 'right: ' + entry.name}")
            wrong += [problem] if problem else []
        if wrong and is_last_word:
            report("The tensor-core fragments are not where the kernels expect them: no further checks.")
        if wrong:
            return False
    return True


def run_ceilings(device: Device, clock: Clock, report: Callable[[str], None]) -> dict[str, float]:
    ceilings = device.measure_ceilings() if clock.allows("ceilings", CEILING_SHARE) else {}
    for name, rate in ceilings.items():
        report(f"- ceiling, {name}: {rate / 1e12:.1f} TFLOP/s" if name == "matrix" else f"- ceiling, {name}: {rate / 1e9:.0f} GB/s")
    return ceilings


def run_timings(
    device: Device, entries: Sequence[Any], ceilings: dict[str, float], clock: Clock, report: Callable[[str], None], outcome: Outcome
) -> None:
    """Adds to the outcome's rows; one that fails (for want of memory, say) does not take the others along."""
    report("\n" + HEADER)
    for entry in entries:
        if not clock.allows(f"timing of {entry.name}", 1.0):
            continue
        try:
            row = timed(device, entry, ceilings)
        except RuntimeError as error:
            report(f"| {entry.name} | FAILED: {str(error).splitlines()[0]} | | | |")
            outcome.failed = True
            continue
        outcome.rows.append(row)
        report(row.text())


def timed(device: Device, entry: Any, ceilings: dict[str, float]) -> Row:
    workload = entry.build(device.bench)
    seconds = device.bench.memory.seconds(workload.launch, device.repeats)
    needed = workload.operations if workload.ceiling == "matrix" else workload.num_bytes
    share = needed / seconds / ceilings[workload.ceiling] if workload.ceiling in ceilings else 0.0
    return Row(entry.name, seconds, workload.num_bytes, workload.operations, workload.ceiling, share, workload.target)


def run_wide(device: Device, ceilings: dict[str, float], clock: Clock, report: Callable[[str], None], outcome: Outcome) -> None:
    """Prefill by wgmma, which nothing uses unless it is told to: after all else, as a kernel that fails ends the whole context."""
    report("\n## Prefill by wgmma\n")
    for entry in device.entries["wide check"]:
        if not clock.allows(f"check of {entry.name}", 1.0):
            return
        problem = run_entry(device, entry)
        report(f"- {'WRONG: ' + problem if problem else 'right: ' + entry.name}")
        if problem:
            report("Wrong on this card: leave WIDE_PREFILL (custom_ops/cuda/ops.py) off.")
            outcome.failed = True
            return
    run_timings(device, device.entries["wide speed"], ceilings, clock, report, outcome)


def run_baselines(device: Device, rows: Sequence[Row], clock: Clock, report: Callable[[str], None]) -> None:
    """Last of all: FlashInfer may compile its kernels first."""
    report("\n" + BESIDE_HEADER)
    for row in rows:
        if not clock.allows(f"others beside {row.name}", 1.0):
            continue
        others = device.baselines(row.name)
        if others:
            report(f"| {row.name} | {', '.join([f'fastengine {row.seconds * 1e6:.1f} us', *others])} |")


# ---- devices ---------------------------------------------------------------------------------------


def shim_device(seed: int) -> Device:
    """The kernels on the host shim at tiny sizes: tests this script, not the card."""
    abi, build, memory, workload = part("abi"), part("build"), part("checks.memory"), part("checks.workload")
    rng = np.random.default_rng(seed)
    bench = workload.Bench(abi.Operators(build.build_shim_library()), memory.HostMemory(rng), rng)
    return Device("host shim", bench, tiny_entries(), 1, lambda: {"copy": 1.0, "matrix": 1.0}, lambda name: [])


def tiny_entries() -> dict[str, Sequence[Any]]:
    catalogue = part("checks.catalogue")
    wide = [*catalogue.WIDE_PROBES, *catalogue.WIDE]
    return {"check": catalogue.TINY, "speed": catalogue.TINY, "wide check": wide, "wide speed": catalogue.WIDE}


def import_torch() -> Any:
    """PyTorch with a usable GPU. Raises NotHere."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise NotHere(f"PyTorch does not import ({error}): pip install torch") from error
    if not torch.cuda.is_available():
        raise NotHere("no GPU: PyTorch sees no CUDA device")
    return torch


def gpu_device(seed: int, report: Callable[[str], None]) -> Device:
    """Builds the library for the first GPU. Raises NotHere, BuildError."""
    torch = import_torch()
    abi, build, memory, workload = part("abi"), part("build"), part("checks.memory"), part("checks.workload")
    architecture = "".join(map(str, torch.cuda.get_device_capability()))
    report(f"{torch.cuda.get_device_name()} (sm_{architecture}), PyTorch {torch.__version__}")
    try:
        known = build.known_architectures(build.find_nvcc())
    except build.NoNvcc as error:
        raise NotHere(str(error)) from error
    # Code for a lower minor version of the same generation runs too.
    fitting = [a for a in known if a[:-1] == architecture[:-1] and int(a) <= int(architecture)]
    if not fitting:
        raise NotHere(f"no kernels for sm_{architecture}: nvcc knows {', '.join(known)}")
    start = time.monotonic()
    library = build.build_c_library(fitting[-1:])
    report(f"built for sm_{fitting[-1]} in {time.monotonic() - start:.0f} s")
    place = memory.TorchMemory(torch, seed)
    bench = workload.Bench(abi.Operators(library), place, np.random.default_rng(seed), place.stream)
    catalogue = part("checks.catalogue")
    baselines = part("checks.baselines")
    others = baselines.Baselines(place, baselines.Sizes(), baselines.import_flashinfer())
    wide = [*catalogue.WIDE_PROBES, *catalogue.WIDE] if fitting[-1] == "90" else []
    entries = {
        "check": [*catalogue.EVERY_KERNEL, *catalogue.CHECKS],
        "speed": catalogue.SPEED,
        "wide check": wide,
        "wide speed": catalogue.WIDE_SPEED,
    }
    return Device(torch.cuda.get_device_name(), bench, entries, 20, lambda: baselines.ceilings(place, baselines.Sizes()), others.texts)


def torch_host_device(seed: int) -> Device:
    """As :func:`shim_device`, with PyTorch's tensors and timings in host memory: tests what a GPU's run does with PyTorch."""
    abi, build, memory, baselines = part("abi"), part("build"), part("checks.memory"), part("checks.baselines")
    place = memory.TorchHostMemory(importlib.import_module("torch"), seed)
    bench = part("checks.workload").Bench(abi.Operators(build.build_shim_library()), place, np.random.default_rng(seed), place.stream)
    sizes = baselines.TINY_SIZES
    others = baselines.Baselines(place, sizes, baselines.import_flashinfer())
    same = {"paged_attention decode": baselines.DECODE, "paged_attention prefill": baselines.PREFILL}

    def measure_ceilings() -> dict[str, float]:
        # The shim's speed is nobody's business: any of it is enough.
        return dict.fromkeys(baselines.ceilings(place, sizes), 1.0)

    entries = tiny_entries()
    return Device("host shim through PyTorch", bench, entries, 1, measure_ceilings, lambda name: others.texts(same.get(name, "")))


# ---- the whole -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What is known so far, should time run out now."""

    is_right: bool = False  # every check of what is used by default
    failed: bool = False  # anything else
    rows: list[Row] = field(default_factory=list)

    @property
    def status(self) -> int:
        if self.failed or not self.is_right:
            return WRONG
        return MISSED_TARGET if any(row.misses for row in self.rows) else RIGHT


def check_device(device: Device, clock: Clock, report: Callable[[str], None], outcome: Outcome) -> int:
    report(f"\n## Results on {device.name}\n")
    if run_checks(device, clock, report):
        report("\n## Speed\n")
        ceilings = run_ceilings(device, clock, report)
        outcome.is_right = True
        run_timings(device, device.entries["speed"], ceilings, clock, report, outcome)
        if device.entries["wide check"]:
            run_wide(device, ceilings, clock, report, outcome)
        run_baselines(device, outcome.rows, clock, report)
    report("")
    for name in clock.skipped:
        report(f"- skipped, out of time: {name}")
    missed = sum(row.misses for row in outcome.rows)
    report(
        f"{'WRONG RESULTS' if outcome.status == WRONG else 'All results are right'}; {missed} targets missed; {len(clock.skipped)} parts skipped; "
        f"{clock.elapsed_s():.0f} s."
    )
    return outcome.status


def end_at(clock: Clock, finish: Callable[[], None], leave: Callable[[], None]) -> threading.Timer:
    """Calls ``finish``, then ``leave``, when the whole budget is used: a kernel that hangs never returns to Python."""

    def out_of_time() -> None:
        finish()
        leave()

    timer = threading.Timer(max(0.0, clock.budget_s - clock.elapsed_s()), out_of_time)
    timer.daemon = True
    timer.start()
    return timer


def check(device_of: Callable[[int, Callable[[str], None]], Device], seed: int, clock: Clock, report: Callable[[str], None], outcome: Outcome) -> int:
    report(f"# CUDA operators, seed {seed}\n")
    try:
        device = device_of(seed, report)
    except NotHere as reason:
        report(f"gpu_check: {reason}")
        return NO_GPU
    except (part("build").BuildError, subprocess.SubprocessError) as error:
        report(f"gpu_check: the build failed: {error}")
        return WRONG
    if not clock.allows("everything but the build", BUILD_SHARE):
        report(f"gpu_check: the build alone took {clock.elapsed_s():.0f} s; run again, it is cached now")
        return WRONG
    return check_device(device, clock, report, outcome)


DEVICES: dict[str, Callable[[int, Callable[[str], None]], Device]] = {
    "gpu": gpu_device,
    "shim": lambda seed, report: shim_device(seed),
    "torch-host": lambda seed, report: torch_host_device(seed),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time fastengine's CUDA operators on a GPU.")
    parser.add_argument(
        "--backend",
        choices=tuple(DEVICES),
        default="gpu",
        help="to test this script, the kernels on the CPU at tiny sizes: shim with numpy alone, torch-host with PyTorch's tensors",
    )
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for everything (default 480)")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: the time)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    args = parser.parse_args(argv)
    clock, lines, outcome = Clock(args.budget_s), [], Outcome()

    def report(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    def write_report() -> None:
        if args.output:
            args.output.write_text("\n".join(lines) + "\n")

    def out_of_time() -> None:
        report(f"\ngpu_check: stopped after {clock.elapsed_s():.0f} s, in what follows the last line above")
        write_report()

    seed = args.seed if args.seed is not None else time.time_ns() % 2**31
    timer = end_at(clock, out_of_time, lambda: os._exit(outcome.status)) if args.backend == "gpu" else None
    try:
        return check(DEVICES[args.backend], seed, clock, report, outcome)
    except Exception:  # noqa: BLE001 - whatever it is, what was found before it is worth keeping
        report(f"\ngpu_check: ended in what follows the last line above:\n{traceback.format_exc()}")
        return WRONG
    finally:
        if timer is not None:
            timer.cancel()
        write_report()


if __name__ == "__main__":
    sys.exit(main())
