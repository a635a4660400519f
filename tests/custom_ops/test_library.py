from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fastengine import custom_ops as ops
from fastengine.custom_ops import library, reference, setup_ops
from tests.custom_ops.helpers import assert_identical, tensor


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=60)


def test_compiled_ops_names_the_instruction_set(isa: str) -> None:
    assert ops.compiled_ops() == dict.fromkeys(ops.OPERATORS, isa)


def test_every_operator_has_a_twin_and_a_docstring() -> None:
    for name in ops.OPERATORS:
        assert callable(getattr(reference, name))
        assert getattr(ops, name).__doc__


def test_a_library_that_is_missing_or_broken_says_so(tmp_path: Path) -> None:
    with pytest.raises(library.LibraryUnavailable, match="was not built"):
        library.load(tmp_path / "none.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(library.LibraryUnavailable, match="does not load"):
        library.load(broken)


def test_without_a_library_the_reference_runs_with_one_warning() -> None:
    # The same package from a folder without the library.
    code = """
import sys, warnings
import paddle
import importlib.util
spec = importlib.util.find_spec("fastengine.custom_ops")
folder = spec.submodule_search_locations[0]
import os, shutil, tempfile
broken = tempfile.mkdtemp()
for name in os.listdir(folder):
    if name.endswith(".py"):
        shutil.copy(os.path.join(folder, name), broken)
copy = importlib.util.spec_from_file_location("fastengine.custom_ops", os.path.join(broken, "__init__.py"), submodule_search_locations=[broken])
module = importlib.util.module_from_spec(copy)
sys.modules["fastengine.custom_ops"] = module
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    copy.loader.exec_module(module)
    x = paddle.ones([2, 4])
    assert module.rms_norm(x, x[0], 0.0).numpy().tolist() == [[1.0] * 4] * 2
ours = [str(w.message) for w in caught if w.category is RuntimeWarning]
assert len(ours) == 1 and "reference operators" in ours[0] and "was not built" in ours[0], ours
assert set(module.compiled_ops().values()) == {"reference"}
module.set_num_threads(2)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_missing_compiler_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(setup_ops.BuildError, match="apt-get install g\\+\\+"):
        setup_ops.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_compile_shows_the_compilers_message_and_keeps_the_old_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / setup_ops.LIBRARY_NAME
    old.write_text("old")
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("#error this kernel is wrong\n")
    monkeypatch.setattr(setup_ops, "PLAIN_SOURCES", [wrong])
    monkeypatch.setattr(setup_ops, "KERNEL_SOURCES", [])
    monkeypatch.setattr(setup_ops, "FUSED_SOURCES", [])
    with pytest.raises(setup_ops.BuildError, match="this kernel is wrong"):
        setup_ops.build(tmp_path)
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", sorted(setup_ops.FUSED_INSTRUCTION_SETS))
def test_weak_symbols_are_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "weak.cpp"
    source.write_text("template <typename T> T twice(T x) { return x + x; }\ntemplate int twice<int>(int);\n")
    subprocess.run(["g++", "-c", str(source), "-o", str(tmp_path / f"weak.{name}.o")], check=True)
    with pytest.raises(setup_ops.BuildError, match="weak symbols"):
        setup_ops.refuse_weak_symbols(tmp_path)


@pytest.mark.parametrize(("refused", "avxvnni"), [("-mavxvnni", False), ("-mno-such-thing", True)])
def test_a_compiler_that_does_not_know_avxvnni_builds_the_rest(tmp_path: Path, refused: str, avxvnni: bool) -> None:
    compiler = tmp_path / "old-g++"
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" {refused} "*) exit 1 ;; esac\nexit 0\n')
    compiler.chmod(0o700)
    assert setup_ops.knows_avxvnni(str(compiler)) is avxvnni
    commands = setup_ops.compile_commands(str(compiler), tmp_path, tmp_path, avxvnni=avxvnni)
    assert all(f"-DFE_HAS_AVXVNNI={int(avxvnni)}" in command for command in commands)
    assert any("-mavxvnni" in command for command in commands) is avxvnni
    outputs = [command[-1] for command in commands]
    assert len(set(outputs)) == len(outputs)


def test_what_kernels_use_of_avx512_is_emulated(tmp_path: Path) -> None:
    emulation = setup_ops.EMULATION.read_text()
    sources = [path for path in setup_ops.CPU.rglob("*") if path.suffix in (".h", ".cpp") and path != setup_ops.EMULATION]
    used = {name for path in sources for name in re.findall(r"\b_mm512_\w+", path.read_text())}
    assert used
    assert used == set(re.findall(r"^#define (_mm512_\w+) ", emulation, re.MULTILINE))
    commands = setup_ops.compile_commands("g++", tmp_path, tmp_path, emulated=True)
    assert {part for command in commands for part in command if part.startswith("-mavx")} == {"-mavx2"}
    assert all((str(setup_ops.EMULATION) in command) == command[-1].endswith((".avx512.o", ".avxvnni.o")) for command in commands)


@pytest.mark.parametrize("count", [0, -3])
def test_thread_count_must_be_positive(count: int) -> None:
    with pytest.raises(ValueError, match=r"^num_threads: "):
        ops.set_num_threads(count)


@pytest.mark.usefixtures("two_threads")
def test_many_jobs_of_many_threads_and_sizes(rng: np.random.Generator) -> None:
    """The pool under load: jobs of several callers, threads added and taken away between them."""
    x, weight = tensor(rng.normal(size=(600, 512))), tensor(rng.normal(size=512))
    expected = ops.rms_norm(x, weight, 1e-6)
    wrong: list[int] = []

    def call(seed: int) -> None:
        for i in range(60):
            ops.set_num_threads(1 + (seed + i) % 4)
            if not np.array_equal(ops.rms_norm(x, weight, 1e-6).numpy(), expected.numpy()):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_parked_workers_use_no_cpu() -> None:
    code = """
import time, numpy as np, paddle
from fastengine import custom_ops as ops
ops.set_num_threads(4)
ops.rms_norm(paddle.ones([2000, 512]), paddle.ones([512]), 1e-6)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) < 0.05


@pytest.mark.usefixtures("isa")
def test_a_forked_child_can_use_the_operators() -> None:
    code = """
import os, sys, paddle
from fastengine import custom_ops as ops
ops.set_num_threads(3)
x, w = paddle.ones([2000, 512]), paddle.ones([512])
ops.rms_norm(x, w, 1e-6)
pid = os.fork()
if pid == 0:
    ops.rms_norm(x, w, 1e-6)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    result = run_python(code)
    assert result.stdout.split()[-1:] == ["7"], result.stderr


@pytest.mark.usefixtures("two_threads")
def test_instruction_sets_agree(rng: np.random.Generator) -> None:
    loaded = ops._loaded
    assert loaded is not None
    x = tensor(rng.normal(size=(40, 576)))
    results = []
    for name in ("avx2", "avx512"):
        if not loaded.use_isa(name):
            pytest.skip(f"this processor has no {name}")
        results.append(ops.argmax(x))
    assert_identical(results[0], results[1])


def test_an_unknown_instruction_set_is_refused(isa: str) -> None:
    loaded = ops._loaded
    assert loaded is not None
    assert not loaded.use_isa("sse9")
    assert loaded.isa == isa
