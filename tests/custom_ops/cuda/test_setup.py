"""What ``setup_ops.py`` does about the CUDA operators."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from fastengine.custom_ops import setup_ops


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = setup_ops.load_cuda_build()
    monkeypatch.setattr(setup_ops, "load_cuda_build", lambda: module)
    monkeypatch.setattr(module, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(module, "known_architectures", lambda nvcc: ("80", "90"))
    monkeypatch.setattr(module, "paddle_has_cuda", lambda: True)
    monkeypatch.setattr(module, "build_paddle_library", lambda architectures, folder: folder / "-".join(architectures))
    return module


def raising(error: Exception) -> object:
    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_it_builds_where_there_is_nvcc(cuda_build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_ops.build_cuda(tmp_path, "auto") == tmp_path / "80-90"
    assert "compiling the CUDA operators for sm_80, sm_90" in capsys.readouterr().out
    assert setup_ops.build_cuda(tmp_path, "never") is None
    with pytest.raises(setup_ops.BuildError, match="auto, always, never, not 'yes'"):
        setup_ops.build_cuda(tmp_path, "yes")


def test_without_nvcc_it_says_so_and_skips(
    cuda_build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", raising(cuda_build.NoNvcc("no CUDA compiler: set NVCC")))
    assert setup_ops.build_cuda(tmp_path, "auto") is None
    assert "no CUDA operators: no CUDA compiler: set NVCC" in capsys.readouterr().out
    with pytest.raises(setup_ops.BuildError, match="set NVCC"):
        setup_ops.build_cuda(tmp_path, "always")


def test_an_nvcc_that_knows_no_architecture_is_no_nvcc(
    cuda_build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_build, "known_architectures", lambda nvcc: ())
    assert setup_ops.build_cuda(tmp_path, "auto") is None
    assert "no CUDA operators: this nvcc knows none" in capsys.readouterr().out


def test_a_paddle_without_cuda_can_not_load_what_was_built(
    cuda_build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_ops.build_cuda(tmp_path, "auto")
    assert "for a Paddle with CUDA" not in capsys.readouterr().out
    monkeypatch.setattr(cuda_build, "paddle_has_cuda", lambda: False)
    assert setup_ops.build_cuda(tmp_path, "auto") == tmp_path / "80-90"
    assert "for a Paddle with CUDA; the one installed here has none" in capsys.readouterr().out


def test_what_it_is_built_from_can_be_packed() -> None:
    files = {path.name for path in setup_ops.cuda_files()}
    assert {"attention_decode.cu", "args.h", "platform.h", "fibers.cpp", "attention.cc", "budget.json"} <= files


def test_a_failed_build_is_an_error_with_the_compilers_message(cuda_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "build_paddle_library", raising(cuda_build.BuildError("error: expected a ;")))
    with pytest.raises(setup_ops.BuildError, match="expected a ;"):
        setup_ops.build_cuda(tmp_path, "auto")


@pytest.mark.parametrize(("version", "has_cuda"), [("False", False), ("12.6", True)])
def test_what_paddles_version_file_says(version: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = setup_ops.load_cuda_build()
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "__init__.py").write_text(f"major = '3'\ncuda_version     = '{version}'\n")
    monkeypatch.setattr(module, "paddle_folder", lambda: tmp_path)
    assert module.paddle_has_cuda() is has_cuda
