"""The kernels compile for every listed architecture and keep to their budget of registers, without local memory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from fastengine.custom_ops.cuda import build


@pytest.fixture(scope="module")
def reports() -> list[str]:
    try:
        nvcc = build.find_nvcc()
    except build.NoNvcc as reason:
        if os.environ.get("FASTENGINE_REQUIRE_NVCC") == "1":
            raise
        pytest.skip(str(reason))
    architectures = build.known_architectures(nvcc)
    assert architectures == tuple(build.ARCHITECTURES), f"{nvcc} compiles for {architectures} only"
    return [report for _, report in build.compile_kernels(architectures)]


@pytest.fixture(scope="module")
def compiled(reports: list[str]) -> list[build.Resources]:
    return [resources for report in reports for resources in build.read_resources(report)]


@pytest.mark.timeout(600)
def test_every_kernel_is_within_its_budget(compiled: list[build.Resources]) -> None:
    assert build.over_budget(compiled) == []


def test_every_kernel_is_compiled_for_every_architecture(compiled: list[build.Resources]) -> None:
    found = {(r.kernel, r.architecture) for r in compiled}
    by_wgmma = {r.kernel for r in compiled if r.kernel.startswith(("wide_prefill_kernel", "product_probe_kernel"))}
    assert len(by_wgmma) == 12
    assert found == {(kernel, a) for kernel, _ in found for a in build.ARCHITECTURES if kernel not in by_wgmma or a == "90"}


def test_asynchronous_products_stay_so(reports: list[str]) -> None:
    """ptxas waits for each by itself, and says so, where it can't tell that their registers are left alone."""
    assert any("for 'sm_90a'" in report for report in reports)
    assert [
        line for report in reports for line in report.splitlines() if "wgmma" in line and "entry function" not in line and "properties" not in line
    ] == []


def test_without_their_architecture_files_are_compiled_for_another() -> None:
    source, wide = build.KERNELS / "norm.cu", build.KERNELS / "attention_prefill_wgmma.cu"
    assert wide in build.kernel_sources()
    assert build.architecture_flags_of(wide, ("80", "90")) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert build.architecture_flags_of(wide, ("80", "89")) == ["-gencode=arch=compute_80,code=sm_80"]
    assert build.architecture_flags_of(source, ("80", "90")) == ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_89,code=sm_90"]


@pytest.mark.timeout(600)
def test_the_paddle_library_links(compiled: list[build.Resources], tmp_path: Path) -> None:
    """What is left open is Paddle's and the system's; every operator that ops.py calls is registered."""
    library = build.build_paddle_library(tuple(build.ARCHITECTURES), tmp_path)
    open_symbols = build.run(["nm", "-C", "--undefined-only", "-D", str(library)])
    assert "paddle::Tensor::stream() const" in open_symbols
    assert "fastengine" not in open_symbols
    assert not re.search(r" U (cuda|fe_)", open_symbols)
    called = set(re.findall(r'_run\(\s*"(\w+)"', (build.HERE / "ops.py").read_text()))
    registered = {name for source in build.BINDING.glob("*.cc") for name in re.findall(r"PD_BUILD_OP\((\w+)\)", source.read_text())}
    assert called == registered
    content = library.read_bytes()
    assert [name for name in registered if name.encode() not in content] == []


def test_the_budget_notices_what_breaks_it() -> None:
    stated = json.loads(build.BUDGET.read_text())["registers"]
    kernel = "silu_mul_kernel<BFloat16>"
    good = [build.Resources(name, a, registers, 0, 0) for name, allowed in stated.items() for a, registers in allowed.items()]
    assert build.over_budget(good) == []
    place = next(i for i, r in enumerate(good) if r.kernel == kernel)
    for change, complaint in (
        ({"registers": good[place].registers + 1}, "allowed"),
        ({"spill_bytes": 4}, "4 bytes of spills"),
        ({"stack_bytes": 8}, "8 of stack"),
        ({"kernel": "unknown_kernel"}, "unknown_kernel on sm_80: not in budget.json"),
    ):
        changed = [*good]
        changed[place] = dataclasses.replace(good[place], **change)
        assert any(complaint in problem for problem in build.over_budget(changed)), change
    assert f"{kernel} on sm_80: in budget.json, not compiled" in build.over_budget(good[:place] + good[place + 1 :])


@pytest.mark.timeout(300)
def test_a_kernel_that_really_spills_breaks_it(reports: list[str], tmp_path: Path) -> None:
    """The compiler itself, told to do with half of the registers: what it reports then is noticed."""
    source = tmp_path / "norm.cu"
    text = (build.KERNELS / "norm.cu").read_text()
    assert text.count("__launch_bounds__(1024)") == 1
    source.write_text(text.replace("__launch_bounds__(1024)", "__launch_bounds__(1024, 2)"))
    flags = [*build.NVCC_FLAGS, *build.architecture_flags(["90"]), f"-I{build.KERNELS}"]
    _, report = build.compile_object([build.find_nvcc()], flags, source)
    problems = build.over_budget(build.read_resources(report))
    assert any(re.search(r"^rms_norm_kernel<float, 4> on sm_90: [1-9]\d* bytes of spills", problem) for problem in problems), problems


def test_the_report_of_ptxas_is_read() -> None:
    report = """
ptxas info    : Compiling entry function '_ZN10fastengine4cuda17_GLOBAL__N_x_1_y15silu_mul_kernelIfEEvNS0_11SiluMulArgsE' for 'sm_90'
ptxas info    : Function properties for f
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 46 registers, used 0 barriers
"""
    (resources,) = build.read_resources(report)
    assert (resources.architecture, resources.registers, resources.spill_bytes, resources.stack_bytes) == ("90", 46, 12, 16)


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        (
            "void fastengine::cuda::(anonymous namespace)::decode_kernel<fastengine::cuda::BFloat16, 4>(fastengine::cuda::AttentionArgs)",
            "decode_kernel<BFloat16, 4>",
        ),
        ("fastengine::cuda::(anonymous namespace)::merge_kernel(fastengine::cuda::AttentionArgs)", "merge_kernel"),
    ],
)
def test_names_are_made_readable(demangled: str, name: str) -> None:
    assert build.readable_name(demangled) == name


@pytest.mark.parametrize(
    ("version", "missing"),
    [(json.loads(build.BUDGET.read_text())["compiler"], ()), ("Build cuda_12.0", build.NVCC_PACKAGES), (None, build.NVCC_PACKAGES)],
)
def test_what_ci_installs(version: str | None, missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where the budget file's compiler is; its packages beside another version, or none."""
    nvcc = tmp_path / "nvcc"
    if version is not None:
        nvcc.write_text(f"#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\necho '{version}'\n")
        nvcc.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: str(nvcc) if version is not None else raise_no_nvcc())
    assert build.missing_packages() == missing


def raise_no_nvcc() -> str:
    raise build.NoNvcc("no CUDA compiler")
