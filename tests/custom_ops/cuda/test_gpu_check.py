"""``scripts/gpu_check.py`` on the host shim: its references, its calls, and what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device(gpu_check: ModuleType) -> object:
    return gpu_check.shim_device(5)


def test_all_results_are_right_and_timed(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--backend", "shim", "--output", str(tmp_path / "report.md")]) == gpu_check.RIGHT
    out = capsys.readouterr().out
    catalogue = gpu_check.part("checks.catalogue")
    for entry in (*catalogue.PROBES, *catalogue.TINY):
        assert f"- right: {entry.name}\n" in out
    for entry in catalogue.TINY:
        assert f"\n| {entry.name} | " in out
    assert "All results are right; 0 targets missed; 0 parts skipped" in out
    assert (tmp_path / "report.md").read_text() == out


def test_every_operator_is_checked_on_the_shim_and_on_a_gpu(gpu_check: ModuleType) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    # The size of the workspace is part of every attention.
    operators = gpu_check.part("abi").parse_operators().keys() - {"attention_workspace"}
    for entries in (catalogue.TINY, catalogue.CHECKS):
        assert {entry.build.func.__name__ for entry in (*catalogue.PROBES, *catalogue.WIDE_PROBES, *entries)} == operators


def test_entries_for_a_gpu_name_known_sizes_and_are_told_apart(gpu_check: ModuleType) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    for entries in (catalogue.EVERY_KERNEL, catalogue.CHECKS, catalogue.SPEED, catalogue.WIDE_SPEED):
        for entry in entries:
            inspect.signature(entry.build.func).bind(None, **entry.build.keywords)
        assert len({(entry.name, str(entry.build.keywords)) for entry in entries}) == len(entries)
    assert {catalogue.DECODE, catalogue.PREFILL} <= {entry.name for entry in catalogue.SPEED}


def run(gpu_check: ModuleType, device: object, budget_s: float = 60.0) -> tuple[int, str]:
    lines: list[str] = []
    return gpu_check.check_device(device, gpu_check.Clock(budget_s), lines.append, gpu_check.Outcome()), "\n".join(lines)


def broken(entry: object) -> object:
    """The entry with its launch left out: outputs stay poisoned."""
    build = entry.build
    return dataclasses.replace(entry, build=lambda bench: dataclasses.replace(build(bench), launch=lambda: None))


def test_unwritten_outputs_are_wrong_whichever_kernel(gpu_check: ModuleType, device: object) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    for entry in (*catalogue.PROBES, *catalogue.TINY, *catalogue.WIDE_PROBES, *catalogue.WIDE):
        assert gpu_check.run_entry(device, broken(entry)) is not None, entry.name


def test_a_wrong_result_ends_in_status_1_without_timings(gpu_check: ModuleType, device: object) -> None:
    entries = [*device.entries["check"][:3], broken(device.entries["check"][3]), device.entries["check"][4]]
    status, text = run(gpu_check, dataclasses.replace(device, entries={**device.entries, "check": entries}))
    assert status == gpu_check.WRONG
    assert f"- WRONG: {entries[3].name}: " in text
    # The others are still checked.
    assert f"- right: {entries[4].name}" in text
    assert gpu_check.HEADER not in text


def test_wrong_fragments_end_the_checks(gpu_check: ModuleType, device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    monkeypatch.setattr(catalogue, "PROBES", [broken(catalogue.PROBES[0])])
    status, text = run(gpu_check, device)
    assert status == gpu_check.WRONG
    assert "no further checks" in text
    assert "right:" not in text


def test_wgmma_that_is_wrong_is_named_after_all_else(gpu_check: ModuleType, device: object) -> None:
    """Nothing uses it by default: the rest is timed as ever, and the status tells."""
    wide = [device.entries["wide check"][0], broken(device.entries["wide check"][-1])]
    status, text = run(gpu_check, dataclasses.replace(device, entries={**device.entries, "wide check": wide}))
    assert status == gpu_check.WRONG
    assert f"- right: {wide[0].name}\n- WRONG: {wide[1].name}: " in text
    assert "leave WIDE_PREFILL" in text
    assert "WRONG RESULTS; 0 targets missed" in text
    for entry in device.entries["speed"]:
        assert f"\n| {entry.name} | " in text
    assert f"| {device.entries['wide speed'][0].name} |" not in text
    # On another card there is none of it.
    status, text = run(gpu_check, dataclasses.replace(device, entries={**device.entries, "wide check": []}))
    assert (status, "wgmma" in text) == (gpu_check.RIGHT, False)


def test_a_timing_that_fails_takes_no_other_along(gpu_check: ModuleType, device: object) -> None:
    def build(bench: object) -> object:
        raise RuntimeError("out of memory\nlong story")

    entries = [dataclasses.replace(device.entries["speed"][0], build=build), device.entries["speed"][1]]
    status, text = run(gpu_check, dataclasses.replace(device, entries={**device.entries, "speed": entries, "wide check": []}))
    assert status == gpu_check.WRONG
    assert f"| {entries[0].name} | FAILED: out of memory | | | |\n| {entries[1].name} | " in text


def test_whatever_ends_it_the_report_is_written(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_device(seed: int, report: object) -> object:
        raise KeyError("a mistake of ours")

    monkeypatch.setitem(gpu_check.DEVICES, "shim", broken_device)
    assert gpu_check.main(["--backend", "shim", "--output", str(tmp_path / "report.md")]) == gpu_check.WRONG
    assert "KeyError: 'a mistake of ours'" in (tmp_path / "report.md").read_text()


def test_a_missed_target_is_named(gpu_check: ModuleType, device: object) -> None:
    slow = dataclasses.replace(device, measure_ceilings=lambda: {"copy": 1e15, "matrix": 1e15})
    status, text = run(gpu_check, slow)
    assert status == gpu_check.MISSED_TARGET
    assert "85% MISSED" in text


def test_parts_that_do_not_fit_are_named(gpu_check: ModuleType, device: object) -> None:
    status, text = run(gpu_check, device, budget_s=0.0)
    assert status == gpu_check.RIGHT
    assert "- skipped, out of time: ceilings" in text
    for name in [entry.name for entry in device.entries["speed"]]:
        assert f"- skipped, out of time: timing of {name}" in text
        assert f"- skipped, out of time: check of {name}" in text


def test_without_a_gpu_it_says_so_and_ends_with_2(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_check.main([]) == gpu_check.NO_GPU
    assert "gpu_check: PyTorch does not import" in capsys.readouterr().out
    torch = ModuleType("torch")
    torch.cuda = ModuleType("cuda")
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert gpu_check.main([]) == gpu_check.NO_GPU
    assert "gpu_check: no GPU" in capsys.readouterr().out


def test_through_pytorch(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """All that a GPU's run does with PyTorch (uploads, random values, ceilings, the attention beside), in host memory."""
    pytest.importorskip("torch")
    assert gpu_check.main(["--backend", "torch-host"]) == gpu_check.RIGHT
    out = capsys.readouterr().out
    catalogue = gpu_check.part("checks.catalogue")
    for entry in (*catalogue.PROBES, *catalogue.TINY):
        assert f"- right: {entry.name}\n" in out
    for attention in ("decode", "prefill"):
        assert re.search(rf"\| paged_attention {attention} \| fastengine [\d.]+ us, SDPA [\d.]+ us", out), out
    assert "All results are right; 0 targets missed; 0 parts skipped" in out


class FakeTorch:
    """Enough of a module for the attention of others to be set up: shapes are all there is."""

    uint8 = bfloat16 = int32 = None

    class Shape(tuple):
        def __mul__(self, other: int) -> FakeTorch.Shape:
            return self

        def to(self, dtype: None) -> FakeTorch.Shape:
            return self

    def randn(self, *shape: int, device: str, dtype: None) -> tuple[int, ...]:
        return shape

    def empty(self, size: int, dtype: None, device: str) -> Shape:
        return self.Shape((size,))

    def arange(self, count: int, device: str, dtype: None) -> Shape:
        return self.Shape((count,))

    def randperm(self, count: int, device: str) -> Shape:
        return self.Shape((count,))

    def full(self, shape: tuple[int, ...], value: int, device: str, dtype: None) -> Shape:
        return self.Shape(shape)


def test_the_attention_of_others_has_the_sizes_of_ours_and_may_fail(gpu_check: ModuleType) -> None:
    baselines, calls = gpu_check.part("checks.baselines"), []

    def attend(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], **options: bool) -> None:
        calls.append((query, key, value, options))

    torch = FakeTorch()
    torch.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=attend))
    memory = SimpleNamespace(torch=torch, device="cuda", seconds=lambda launch, repeats: (launch(), 1e-3)[1])

    class Wrapper:
        def __init__(self, workspace: object, layout: str): ...

        def plan(self, starts: tuple[int], order: tuple[int], last: tuple[int], *sizes: int, **types: None) -> None:
            calls.append((starts, order, last, sizes))

        def run(self, query: tuple[int, ...], cache: tuple[int, ...]) -> None:
            calls.append((query, cache))

    def prefill(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], causal: bool) -> None:
        raise RuntimeError("no kernel image\nlong story")

    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, single_prefill_with_kv_cache=prefill)
    others = baselines.Baselines(memory, baselines.Sizes(), flashinfer)
    assert others.texts(baselines.DECODE) == ["SDPA 1000.0 us", "FlashInfer 1000.0 us"]
    cache = (64, 8, 4096, 128)
    assert calls[0] == ((64, 32, 1, 128), cache, cache, {"enable_gqa": True})
    assert calls[1] == ((65,), (64 * 256,), (64,), (32, 8, 128, 16))
    assert calls[2] == ((64, 32, 128), (64 * 256, 2, 16, 8, 128))
    assert others.texts(baselines.PREFILL) == ["SDPA 1000.0 us", "FlashInfer failed: no kernel image"]
    assert calls[3] == ((1, 32, 8192, 128), (1, 8, 8192, 128), (1, 8, 8192, 128), {"is_causal": True, "enable_gqa": True})
    assert others.texts("rms_norm") == []
    assert baselines.Baselines(memory, baselines.Sizes(), None).texts(baselines.PREFILL) == ["SDPA 1000.0 us"]


def test_a_run_that_hangs_ends_with_its_budget_and_with_what_is_known(gpu_check: ModuleType) -> None:
    calls, left = [], threading.Event()
    clock = gpu_check.Clock(0.0)
    gpu_check.end_at(clock, lambda: calls.append("report"), lambda: (calls.append("leave"), left.set()))
    assert left.wait(30)
    assert calls == ["report", "leave"]
    later = gpu_check.end_at(gpu_check.Clock(3600.0), lambda: calls.append("never"), lambda: None)
    assert later.interval > 3500
    assert later.daemon
    later.cancel()


def test_the_outcome_is_known_before_others_are_timed(gpu_check: ModuleType, device: object) -> None:
    """FlashInfer compiles its kernels at its first call: what a budget that ends there leaves behind is our own result."""
    outcome = gpu_check.Outcome()
    seen = []

    def slow(name: str) -> list[str]:
        seen.append((outcome.status, len(outcome.rows)))
        return ["other 1.0 us"] if name == "argmax" else []

    assert outcome.status == gpu_check.WRONG
    expected = (gpu_check.RIGHT, len(device.entries["speed"]) + len(device.entries["wide speed"]))
    lines: list[str] = []
    gpu_check.check_device(dataclasses.replace(device, baselines=slow), gpu_check.Clock(600.0), lines.append, outcome)
    assert seen == [expected] * expected[1]
    assert len([line for line in lines if re.match(r"\| argmax \| fastengine [\d.]+ us, other 1.0 us \|", line)]) == 1


def test_comparison(gpu_check: ModuleType) -> None:
    workload = gpu_check.part("checks.workload")
    expected = np.array([[1.0, -np.inf], [0.0, 100.0]])
    workload.require_close("x", expected + np.array([[0.01, 0], [0.01, 1.0]]), expected, 0.01, 0.01)
    for place, value in (((0, 0), np.nan), ((0, 1), -1e9), ((1, 0), 0.02), ((1, 1), np.inf)):
        actual = expected.copy()
        actual[place] = value
        with pytest.raises(workload.WrongResult, match=rf"x: 1 of 4 wrong; at \[{place[0]}, {place[1]}\]"):
            workload.require_close("x", actual, expected, 0.01, 0.01)
    with pytest.raises(workload.WrongResult, match="shape"):
        workload.require_close("x", expected[:1], expected, 0.01, 0.01)


@pytest.mark.parametrize(("capability", "wide"), [((9, 0), True), ((8, 9), False), ((8, 6), False)])
def test_a_gpus_own_way_through_pytorch(
    gpu_check: ModuleType, capability: tuple[int, int], wide: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, line by line, with PyTorch's own tensors, streams and events replaced by the host's: a misspelt name ends here."""
    torch = pytest.importorskip("torch")
    memory, catalogue, build = (gpu_check.part(name) for name in ("checks.memory", "checks.catalogue", "build"))

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda: capability,
        "get_device_name": lambda: "stand-in",
        "current_stream": lambda: SimpleNamespace(cuda_stream=0),
        "synchronize": lambda: None,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(memory.TorchMemory, "device", "cpu")
    monkeypatch.setattr(memory.TorchMemory, "flush_bytes", 1024)
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "known_architectures", lambda nvcc: ("80", "89", "90", "100"))
    built: list[Sequence[str]] = []
    monkeypatch.setattr(build, "build_c_library", lambda architectures: built.append(architectures) or build.build_shim_library())
    baselines = gpu_check.part("checks.baselines")
    monkeypatch.setattr(baselines, "Sizes", lambda: baselines.TINY_SIZES)
    for name in ("EVERY_KERNEL", "CHECKS", "SPEED"):
        monkeypatch.setattr(catalogue, name, catalogue.TINY)
    monkeypatch.setattr(catalogue, "WIDE_SPEED", catalogue.WIDE)
    assert gpu_check.main(["--seed", "3"]) in (gpu_check.RIGHT, gpu_check.MISSED_TARGET)
    out = capsys.readouterr().out
    assert built == [[{(9, 0): "90", (8, 9): "89", (8, 6): "80"}[capability]]]
    assert f"stand-in (sm_{capability[0]}{capability[1]}), PyTorch {torch.__version__}" in out
    assert ("## Prefill by wgmma" in out) == wide
    assert "All results are right" in out
    assert "0 parts skipped" in out
