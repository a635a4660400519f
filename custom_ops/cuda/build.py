"""Build the CUDA operators: ``python custom_ops/cuda/build.py --help``.

Products from the same kernels:

- :func:`build_c_library`: the C interface (``kernels/launchers.h``), for ``scripts/gpu_check.py``;
- :func:`build_paddle_library`: the kernels with Paddle's binding, what the worker loads;
- :func:`build_shim_library`: the kernels on the host shim, for tests without a GPU.
  :func:`build_shim_paddle_library`: these with Paddle's binding, for a Paddle without CUDA.

Object files are cached by the content they are made from, in ``$XDG_CACHE_HOME/fastengine/cuda``.
Uses the standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"
SHIM = HERE / "host_shim"
BINDING = HERE / "binding"
BUDGET = HERE / "budget.json"
PADDLE_LIBRARY_NAME = "libfastengine_cuda.so"

# Compute capability -> the virtual architecture its code is generated through. No kernel uses more than
# 8.9 has over 8.0 (conversions of fp8), and the pass to the virtual architecture is half of the build.
ARCHITECTURES = {"80": "80", "89": "89", "90": "89", "100": "89"}

# What ends so uses instructions of one architecture alone (wgmma), and is compiled for that one, as its own variant.
ONE_ARCHITECTURE = {"_wgmma": ("90", "90a")}

# The compiler from PyPI: what CI installs where it lacks the one that the budget file was written with.
NVCC_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)

NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-Xptxas", "-v"]
SHIM_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
# Paddle's headers are not free of warnings, and its Python half is not needed here.
BINDING_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-w", "-DPADDLE_NO_PYTHON", "-fvisibility=hidden"]


class BuildError(RuntimeError):
    """Something could not be built; the text says what and why."""


class NoNvcc(BuildError):
    """There is no CUDA compiler here."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel for one architecture."""

    kernel: str
    architecture: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fastengine" / "cuda"


def kernel_sources() -> list[Path]:
    return sorted(KERNELS.glob("*.cu"))


def find_nvcc() -> str:
    """``$NVCC``, else nvcc on the path, under ``$CUDA_HOME`` or ``/usr/local/cuda``, or from the
    ``nvidia-cuda-nvcc`` package of this Python. Raises NoNvcc."""
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc")]
    candidates += [str(Path(root) / "bin" / "nvcc") for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package is not None else ():
        candidates += [str(path) for path in sorted(Path(root).glob("cu*/bin/nvcc"))]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise NoNvcc("no CUDA compiler: set NVCC or CUDA_HOME, or pip install " + " ".join(NVCC_PACKAGES))


def toolkit_folder(nvcc: str) -> Path:
    """The toolkit that an nvcc (maybe a wrapper script or a link) belongs to."""
    match = re.search(r"#\$ TOP=(.+)", run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]))
    return Path(match.group(1)).resolve() if match is not None else Path(nvcc).resolve().parent.parent


@lru_cache
def tool_version(command: str) -> str:
    return run([*command.split(), "--version"])


@lru_cache
def known_architectures(nvcc: str) -> tuple[str, ...]:
    """Those of ARCHITECTURES that this nvcc compiles for."""
    listed = set(re.findall(r"sm_(\w+)", run([nvcc, "--list-gpu-code"])))
    return tuple(name for name in ARCHITECTURES if name in listed)


def run(command: Sequence[str]) -> str:
    result = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"this command failed with code {result.returncode}:\n  {' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def included_files(source: Path) -> list[Path]:
    """``source`` and every file of this folder that it includes, in a fixed order."""
    found: list[Path] = []
    open_files = [source.resolve()]
    while open_files:
        path = open_files.pop()
        if path in found or not path.is_file():
            continue
        found.append(path)
        open_files += [(path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)]
    return sorted(found)


def compile_object(compiler: Sequence[str], flags: Sequence[str], source: Path) -> tuple[Path, str]:
    """The object file of ``source`` and what the compiler printed, from the cache where its content is known."""
    digest = hashlib.sha256()
    for part in (tool_version(" ".join(compiler)), *compiler, *flags):
        digest.update(part.encode() + b"\0")
    # nvcc does not see the shim's files, though the text includes them.
    on_gpu = source.suffix == ".cu" and "-x" not in flags
    for path in included_files(source):
        if on_gpu and SHIM in path.parents:
            continue
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    output = cache_folder() / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    log = output.with_suffix(".log")
    if not (output.is_file() and log.is_file()):
        output.parent.mkdir(parents=True, exist_ok=True)
        # Whole files only, whoever builds at the same time.
        staged = output.with_suffix(f".{os.getpid()}.o")
        text = run([*compiler, *flags, "-c", str(source), "-o", str(staged)])
        staged_log = log.with_suffix(f".{os.getpid()}.log")
        staged_log.write_text(text)
        staged_log.replace(log)
        staged.replace(output)
    return output, log.read_text()


def compile_all(jobs: Sequence[tuple[Sequence[str], Sequence[str], Path]]) -> list[tuple[Path, str]]:
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: compile_object(*job), jobs))


def link(linker: Sequence[str], objects: Sequence[Path], flags: Sequence[str], output: Path) -> Path:
    """Links a shared library, put into place whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.with_suffix(f".{os.getpid()}.so")
    run([*linker, "-shared", "-o", str(staged), *map(str, objects), *flags])
    staged.replace(output)
    return output


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    return [f"-gencode=arch=compute_{ARCHITECTURES[name]},code=sm_{name}" for name in architectures]


def architecture_flags_of(source: Path, architectures: Sequence[str]) -> list[str]:
    """Those of one file; one whose only architecture is not wanted is compiled for the first that is, without its kernels."""
    for ending, (name, variant) in ONE_ARCHITECTURE.items():
        if source.stem.endswith(ending):
            if name in architectures:
                return [f"-gencode=arch=compute_{variant},code=sm_{variant}"]
            return architecture_flags(architectures[:1])
    return architecture_flags(architectures)


def compile_kernels(architectures: Sequence[str]) -> list[tuple[Path, str]]:
    """Every kernel file as one object for ``architectures``, with ptxas's report. Raises NoNvcc, BuildError."""
    nvcc = find_nvcc()
    return compile_all([([nvcc], [*NVCC_FLAGS, *architecture_flags_of(source, architectures)], source) for source in kernel_sources()])


def digest_of(objects: Sequence[Path]) -> str:
    return hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:16]


def build_c_library(architectures: Sequence[str]) -> Path:
    """A shared library of the C interface, CUDA's runtime linked in."""
    objects = [path for path, _ in compile_kernels(architectures)]
    nvcc = find_nvcc()
    # The packages keep the runtime in lib, where their nvcc does not look.
    return link([nvcc], objects, ["-cudart", "static", f"-L{toolkit_folder(nvcc) / 'lib'}"], cache_folder() / f"libfe_cuda-{digest_of(objects)}.so")


def paddle_folder() -> Path:
    """Where Paddle is installed; found without importing it. Raises BuildError."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise BuildError("Paddle is not installed in this environment")
    return Path(spec.origin).parent


def paddle_has_cuda() -> bool:
    """Whether the installed Paddle could load the CUDA operators."""
    text = (paddle_folder() / "version" / "__init__.py").read_text()
    return re.search(r"^cuda_version\s*=\s*'(?!False)", text, re.MULTILINE) is not None


def compile_binding(extra_flags: Sequence[str]) -> list[Path]:
    include = paddle_folder() / "include"
    flags = [*BINDING_FLAGS, *extra_flags, f"-I{include}", f"-I{include / 'third_party'}"]
    compiler = (os.environ.get("CXX") or "g++").split()
    return [path for path, _ in compile_all([(compiler, flags, source) for source in sorted(BINDING.glob("*.cc"))])]


def link_with_paddle(linker: Sequence[str], objects: Sequence[Path], flags: Sequence[str], output: Path) -> Path:
    # No run path: the process has loaded Paddle's libraries before this one, from wherever they are.
    folders = [f"-L{paddle_folder() / name}" for name in ("base", "libs")]
    libraries = ["-l:libpaddle.so", "-l:libphi.so", "-l:libphi_core.so", "-l:libcommon.so"]
    return link(linker, objects, [*folders, *libraries, *flags], output)


def build_paddle_library(architectures: Sequence[str], output_folder: Path) -> Path:
    """The kernels with Paddle's binding in one library. Compiles against any Paddle's headers, the CPU's too,
    but only a Paddle with CUDA can load it. Raises NoNvcc, BuildError."""
    nvcc = find_nvcc()
    toolkit = toolkit_folder(nvcc)
    kernels = [path for path, _ in compile_kernels(architectures)]
    binding = compile_binding(["-DPADDLE_WITH_CUDA", f"-I{toolkit / 'include'}", f"-I{toolkit / 'include' / 'cccl'}"])
    flags = ["-cudart", "static", f"-L{toolkit / 'lib'}", "-Xlinker", "--no-as-needed,--allow-shlib-undefined"]
    return link_with_paddle([nvcc], [*binding, *kernels], flags, output_folder / PADDLE_LIBRARY_NAME)


def build_shim_paddle_library() -> Path:
    """The binding over the kernels on the host shim: a Paddle without CUDA loads it, and its tensors lie in host memory."""
    shim, compiler = shim_objects(), (os.environ.get("CXX") or "g++").split()
    binding = compile_binding([])
    output = cache_folder() / f"libfe_shim_paddle-{digest_of([*binding, *shim])}.so"
    flags = ["-Wl,--no-as-needed,--allow-shlib-undefined"]
    return output if output.is_file() else link_with_paddle(compiler, [*binding, *shim], flags, output)


def shim_objects(extra_sources: Sequence[Path] = ()) -> list[Path]:
    compiler = (os.environ.get("CXX") or "g++").split()
    jobs: list[tuple[Sequence[str], Sequence[str], Path]] = [
        (compiler, [*SHIM_FLAGS, "-x", "c++"], source) for source in (*kernel_sources(), *extra_sources)
    ]
    jobs += [(compiler, SHIM_FLAGS, source) for source in sorted(SHIM.glob("*.cpp"))]
    return [path for path, _ in compile_all(jobs)]


def build_shim_library(extra_sources: Sequence[Path] = ()) -> Path:
    """The kernels (and ``extra_sources``) compiled for the host shim."""
    objects, compiler = shim_objects(extra_sources), (os.environ.get("CXX") or "g++").split()
    output = cache_folder() / f"libfe_shim-{digest_of(objects)}.so"
    return output if output.is_file() else link(compiler, objects, ["-Wl,--no-undefined"], output)


_RESOURCES = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def readable_name(demangled: str) -> str:
    """``rms_norm_kernel<BFloat16, 2>`` from a demangled kernel."""
    text = demangled.replace("(anonymous namespace)::", "").replace("fastengine::cuda::", "").removeprefix("void ")
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return text[:at]
    return text


def is_budget_compiler(nvcc: str) -> bool:
    """Whether the budget file was written with this version: another one may use other numbers of registers."""
    return version_line(nvcc) == json.loads(BUDGET.read_text())["compiler"]


def missing_packages() -> tuple[str, ...]:
    """What brings the budget file's compiler; nothing where it is here."""
    try:
        return () if is_budget_compiler(find_nvcc()) else NVCC_PACKAGES
    except BuildError:
        return NVCC_PACKAGES


def version_line(nvcc: str) -> str:
    return tool_version(nvcc).strip().splitlines()[-1]


def read_resources(report: str) -> list[Resources]:
    """The kernels of one file from ptxas's report (``-Xptxas -v``). Needs ``c++filt``, which comes with g++."""
    found = _RESOURCES.findall(report)
    names = run(["c++filt", *(kernel for kernel, *_ in found)]).splitlines() if found else []
    return [
        Resources(readable_name(name), architecture.rstrip("a"), int(registers), int(stores) + int(loads), int(stack))
        for name, (_, architecture, stack, stores, loads, registers) in zip(names, found, strict=True)
    ]


# ---- the budget --------------------------------------------------------------------------------------


def registers_allowed(used: int) -> int:
    """Registers are handed out in eights: as many cost the same."""
    return -(-used // 8) * 8


def budget_of(resources: Sequence[Resources]) -> dict[str, dict[str, int]]:
    """What the budget file holds: kernel -> architecture -> registers."""
    budget: dict[str, dict[str, int]] = {}
    for r in sorted(resources, key=lambda r: (r.kernel, int(r.architecture))):
        budget.setdefault(r.kernel, {})[r.architecture] = registers_allowed(r.registers)
    return budget


def over_budget(resources: Sequence[Resources]) -> list[str]:
    """What breaks the budget file, in words: more registers than stated, spills, local memory, unknown kernels."""
    stated = json.loads(BUDGET.read_text())
    problems = []
    for r in resources:
        where = f"{r.kernel} on sm_{r.architecture}"
        allowed = stated["registers"].get(r.kernel, {}).get(r.architecture)
        if allowed is None:
            problems.append(f"{where}: not in {BUDGET.name}")
        elif r.registers > allowed:
            problems.append(f"{where}: {r.registers} registers, {allowed} allowed")
        local = stated["local_memory"].get(r.kernel, {}).get(r.architecture, 0)
        if max(r.spill_bytes, r.stack_bytes) > local:
            problems.append(f"{where}: {r.spill_bytes} bytes of spills, {r.stack_bytes} of stack, {local} allowed")
    seen = {(r.kernel, r.architecture) for r in resources}
    architectures = {r.architecture for r in resources}
    for kernel, by_architecture in stated["registers"].items():
        problems += [f"{kernel} on sm_{a}: in {BUDGET.name}, not compiled" for a in by_architecture if a in architectures and (kernel, a) not in seen]
    return problems


def write_budget(resources: Sequence[Resources]) -> None:
    """Overwrites the budget file with what ``resources`` use; local memory stays as stated, to be changed by hand."""
    local = json.loads(BUDGET.read_text())["local_memory"] if BUDGET.is_file() else {}
    content = {"compiler": version_line(find_nvcc()), "local_memory": local, "registers": budget_of(resources)}
    BUDGET.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build fastengine's CUDA operators.")
    parser.add_argument("--architectures", default="", help="compute capabilities, e.g. 80,90 (default: all that nvcc knows of 80, 89, 90, 100)")
    parser.add_argument("--c-library", action="store_true", help="build the C interface alone (no Paddle needed) and print its path")
    parser.add_argument("--paddle-library", type=Path, metavar="FOLDER", help=f"build {PADDLE_LIBRARY_NAME} into this folder")
    parser.add_argument("--write-budget", action="store_true", help=f"write the registers that the kernels use to {BUDGET.name}")
    parser.add_argument("--missing-packages", action="store_true", help=f"print the PyPI packages to install unless nvcc is the one of {BUDGET.name}")
    args = parser.parse_args()
    if args.missing_packages:
        print("\n".join(missing_packages()))
        return 0
    try:
        architectures = args.architectures.split(",") if args.architectures else known_architectures(find_nvcc())
        if args.write_budget:
            write_budget([r for _, log in compile_kernels(architectures) for r in read_resources(log)])
        if args.c_library:
            print(build_c_library(architectures))
        if args.paddle_library:
            print(build_paddle_library(architectures, args.paddle_library))
    except BuildError as error:
        print(f"fastengine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
