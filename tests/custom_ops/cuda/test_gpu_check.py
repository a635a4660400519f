"""``scripts/gpu_check.py`` on the host shim: its references, its calls, and what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

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
        assert {entry.build.func.__name__ for entry in (*catalogue.PROBES, *entries)} == operators


def test_entries_for_a_gpu_name_known_sizes_and_are_told_apart(gpu_check: ModuleType) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    for entries in (catalogue.CHECKS, catalogue.SPEED):
        for entry in entries:
            inspect.signature(entry.build.func).bind(None, **entry.build.keywords)
        assert len({(entry.name, str(entry.build.keywords)) for entry in entries}) == len(entries)
    assert {catalogue.DECODE, catalogue.PREFILL} <= {entry.name for entry in catalogue.SPEED}


def run(gpu_check: ModuleType, device: object, budget_s: float = 60.0) -> tuple[int, str]:
    lines: list[str] = []
    return gpu_check.check_device(device, gpu_check.Clock(budget_s), lines.append), "\n".join(lines)


def broken(entry: object) -> object:
    """The entry with its launch left out: outputs stay poisoned."""
    build = entry.build
    return dataclasses.replace(entry, build=lambda bench: dataclasses.replace(build(bench), launch=lambda: None))


def test_unwritten_outputs_are_wrong_whichever_kernel(gpu_check: ModuleType, device: object) -> None:
    catalogue = gpu_check.part("checks.catalogue")
    for entry in (*catalogue.PROBES, *catalogue.TINY):
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
