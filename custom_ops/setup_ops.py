"""Compile the operators: ``python custom_ops/setup_ops.py`` puts the libraries beside this file.

The CUDA operators are compiled too, for sm_80, 89, 90 and 100, where there is nvcc (see cuda/build.py).

The kernels are compiled once per instruction set; the library picks one by CPUID when it is loaded, so
it runs on any x86-64 machine whatever the one that built it. The package's ``setup.py`` calls
:func:`build` for its ``build_ext`` step. Needs g++ and an installed Paddle (its headers, 3.3).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CPU = HERE / "cpu"
CUDA = HERE / "cuda"
CUDA_CHOICES = ("auto", "always", "never")
LIBRARY_NAME = "libfastengine_cpu.so"
# For tests on processors without AVX-512 and AVX-VNNI: their kernels, with what these have and AVX2 has not emulated.
EMULATED_LIBRARY_NAME = "libfastengine_cpu_emulated.so"
EMULATION = CPU / "emulated" / "avx512.h"

# Compiled once for any x86-64 processor.
PLAIN_SOURCES = [
    *(CPU / "binding.cpp", CPU / "block_copy.cpp", CPU / "control.cpp", CPU / "kernels" / "thread_pool.cpp"),
    *(CPU / "fused" / f"{name}.cpp" for name in ("api", "model", "pack", "slot_step", "step_isa")),
]
KERNEL_SOURCES = [
    CPU / "kernels" / f"{name}.cpp"
    for name in ("attention", "attention_decode", "attention_prefill", "elementwise", "logits", "rotary", "sample", "sample_rows")
]
# The fused step has a set more, AVX2 with the int8 dot product, and its AVX-512 version needs that product as well: fused/step_isa.h.
FUSED_SOURCES = [
    CPU / "fused" / f"{name}.cpp"
    for name in (
        "attention_float",
        "attention_int8",
        "gemm_float",
        "gemm_int4",
        "gemm_int8",
        "head",
        "heads",
        "kv_write",
        "quantize",
        "roofline",
        "step",
        "workspace",
    )
]
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
}
FUSED_INSTRUCTION_SETS = {
    "avx2": [*INSTRUCTION_SETS["avx2"], "-mf16c"],
    "avxvnni": [*INSTRUCTION_SETS["avx2"], "-mf16c", "-mavxvnni"],
    "avx512": [*INSTRUCTION_SETS["avx512"], "-mf16c", "-mavx512vnni"],
}
# What the avxvnni set asks of the compiler and its assembler.
AVXVNNI_PROBE = """
#include <immintrin.h>
__m256i add(__m256i sums, __m256i weights, __m256i values) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(values));
  return sums;
}
"""

COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC takes the undefined pass-through operand of its own AVX-512 intrinsics for a mistake of ours.
KERNEL_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# Paddle's headers are not free of warnings, and its Python half is not needed here.
BINDING_FLAGS = ["-w", "-O2", "-DPADDLE_NO_PYTHON", "-DPADDLE_WITH_CUSTOM_KERNEL", "-D_GLIBCXX_USE_CXX11_ABI=1"]


class BuildError(RuntimeError):
    """The operators could not be built; the text says why, and what to do."""


def sources() -> list[Path]:
    return [*PLAIN_SOURCES, *KERNEL_SOURCES, *FUSED_SOURCES]


def headers() -> list[Path]:
    return sorted(CPU.rglob("*.h"))


def find_compiler() -> str:
    """The C++ compiler: ``$CXX``, else ``g++``. Raises BuildError naming what to install."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(
            f"the CPU operators need an x86-64 processor, this one is {platform.machine()}; "
            "set FASTENGINE_SKIP_OPS=1 to install without them (the slower plain-Paddle operators are used)"
        )
    compiler = os.environ.get("CXX") or "g++"
    found = shutil.which(compiler.split()[0])
    if found is None:
        raise BuildError(
            f"no C++ compiler: '{compiler}' was not found. Install one (apt-get install g++), or set "
            "FASTENGINE_SKIP_OPS=1 to install without the compiled operators (slow)"
        )
    return compiler


def paddle_folder() -> Path:
    """Where Paddle is installed. Found without importing it, which takes over a second."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise BuildError("Paddle is not installed in this environment: pip install 'paddlepaddle>=3.3,<3.4', then build again")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "paddle" / "extension.h").is_file():
        raise BuildError(f"the Paddle in {folder} came without its C++ headers; install the official wheel")
    return folder


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"this command failed with code {result.returncode}:\n  {' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def knows_avxvnni(compiler: str) -> bool:
    """Whether the compiler can build the avxvnni set: GCC 11 or later with binutils of its time."""
    command = [*compiler.split(), *FUSED_INSTRUCTION_SETS["avxvnni"], "-x", "c++", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=AVXVNNI_PROBE, capture_output=True, text=True, check=False).returncode == 0


def flags_of(name: str, sets: dict[str, list[str]], *, emulated: bool) -> list[str]:
    """What the compiler is told of an instruction set."""
    if name == "avx2" or not emulated:
        return sets[name]
    return [*sets["avx2"], "-mf16c", "-include", str(EMULATION), *(["-DFE_EMULATED_AVX512", "-Wno-psabi"] if name == "avx512" else [])]


def compile_commands(compiler: str, paddle: Path, objects: Path, *, avxvnni: bool = True, emulated: bool = False) -> list[list[str]]:
    """One command per object file, the slowest first."""
    base = [*compiler.split(), *COMMON_FLAGS, f"-DFE_HAS_AVXVNNI={int(avxvnni)}", *(["-DFE_EMULATED"] if emulated else [])]
    includes = [f"-isystem{paddle / 'include'}", f"-isystem{paddle / 'include' / 'third_party'}"]
    commands = []
    for source in PLAIN_SOURCES:
        extra = [*BINDING_FLAGS, *includes] if source.name == "binding.cpp" else []
        commands.append([*base, *extra, "-c", str(source), "-o", str(objects / f"{source.stem}.o")])
    for sources, sets in ((KERNEL_SOURCES, INSTRUCTION_SETS), (FUSED_SOURCES, FUSED_INSTRUCTION_SETS)):
        for name in sets:
            flags = flags_of(name, sets, emulated=emulated)
            for source in sources if avxvnni or name != "avxvnni" else ():
                output = objects / f"{source.stem}.{name}.o"
                commands.append([*base, *KERNEL_FLAGS, *flags, f"-DFE_ISA={name}", "-c", str(source), "-o", str(output)])
    return commands


def link_command(compiler: str, paddle: Path, objects: list[str], output: Path) -> list[str]:
    # No run path: the process has loaded Paddle's libraries before this one, from wherever they are.
    folders = [f"-L{paddle / 'base'}", f"-L{paddle / 'libs'}"]
    libraries = ["-l:libpaddle.so", "-l:libphi.so", "-l:libphi_core.so", "-l:libcommon.so", "-pthread"]
    linker = ["-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    return [*compiler.split(), "-shared", "-o", str(output), *objects, *linker, *folders, *libraries]


def refuse_weak_symbols(objects: Path) -> None:
    """A weak symbol of one instruction set could be linked into the other's kernels: see simd.h."""
    nm = shutil.which("nm")
    if nm is None:
        return
    for name in FUSED_INSTRUCTION_SETS:
        for path in sorted(objects.glob(f"*.{name}.o")):
            defined = run([nm, "--defined-only", str(path)]).splitlines()
            weak = [line for line in defined if line.split()[-2] in ("W", "V", "u")]
            if weak:
                raise BuildError(f"{path.name} defines weak symbols, which may mix instruction sets:\n" + "\n".join(weak))


def build(output_folder: Path, jobs: int | None = None, *, emulated: bool = False) -> Path:
    """Compiles and links the library, or the one with emulated instruction sets, into ``output_folder`` and returns its path.

    Raises BuildError, with the compiler's message, when anything fails; an older library then stays.
    """
    compiler, paddle = find_compiler(), paddle_folder()
    avxvnni = emulated or knows_avxvnni(compiler)
    if not avxvnni:
        print(
            f"fastengine: no AVX-VNNI version of the fused step: {compiler} does not know it (GCC 11 does); such processors take AVX2's", flush=True
        )
    output_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fastengine-ops-") as temporary:
        objects = Path(temporary)
        commands = compile_commands(compiler, paddle, objects, avxvnni=avxvnni, emulated=emulated)
        print(f"fastengine: compiling {len(commands)} objects of the CPU operators", flush=True)
        with ThreadPoolExecutor(max_workers=jobs or len(os.sched_getaffinity(0))) as pool:
            list(pool.map(run, commands))
        refuse_weak_symbols(objects)
        linked = objects / LIBRARY_NAME
        run(link_command(compiler, paddle, [command[-1] for command in commands], linked))
        # Moved into place whole: a running process keeps the library it has mapped.
        target = output_folder / (EMULATED_LIBRARY_NAME if emulated else LIBRARY_NAME)
        staged = target.with_suffix(".so.new")
        shutil.copyfile(linked, staged)
        staged.replace(target)
    print(f"fastengine: built {target}", flush=True)
    return target


def load_cuda_build() -> ModuleType:
    """cuda/build.py by its path: the folder is no package before it is installed."""
    spec = importlib.util.spec_from_file_location("fastengine_cuda_build", HERE / "cuda" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cuda_files() -> list[Path]:
    """What the CUDA operators are built from."""
    return sorted(path for path in CUDA.rglob("*") if path.suffix in (".cu", ".cc", ".cpp", ".h", ".json"))


def cuda_architectures(choice: str) -> tuple[str, ...]:
    """What the CUDA operators can be compiled for here; nothing, with a line that says why, where they are left out.

    ``choice``: ``auto`` where there is nvcc, ``always``, ``never``. Raises BuildError for another, or if there is no nvcc for ``always``.
    """
    if choice not in CUDA_CHOICES:
        raise BuildError(f"the CUDA operators can be built {', '.join(CUDA_CHOICES)}, not {choice!r}")
    if choice == "never":
        return ()
    cuda = load_cuda_build()
    try:
        architectures: tuple[str, ...] = cuda.known_architectures(cuda.find_nvcc())
    except cuda.NoNvcc as reason:
        if choice == "always":
            raise BuildError(str(reason)) from None
        print(f"fastengine: no CUDA operators: {reason}", flush=True)
        return ()
    except cuda.BuildError as error:
        raise BuildError(str(error)) from None
    if not architectures:
        print("fastengine: no CUDA operators: this nvcc knows none of their architectures", flush=True)
    return architectures


def build_cuda(output_folder: Path, choice: str) -> Path | None:
    """Builds the CUDA operators into ``output_folder``; None where they are left out, as :func:`cuda_architectures` says. Raises BuildError."""
    architectures = cuda_architectures(choice)
    if not architectures:
        return None
    cuda = load_cuda_build()
    print(f"fastengine: compiling the CUDA operators for {', '.join(f'sm_{name}' for name in architectures)}", flush=True)
    try:
        target: Path = cuda.build_paddle_library(architectures, output_folder)
        note = "" if cuda.paddle_has_cuda() else " (for a Paddle with CUDA; the one installed here has none)"
    except cuda.BuildError as error:
        raise BuildError(str(error)) from None
    print(f"fastengine: built {target}{note}", flush=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile fastengine's operators.")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--inplace", action="store_true", help="put the library beside this file (the default)")
    place.add_argument("--output", type=Path, default=HERE, help="put the library into this folder instead")
    parser.add_argument("--jobs", type=int, default=None, help="compilers to run at once (default: one per core)")
    parser.add_argument("--cuda", choices=CUDA_CHOICES, default="auto", help="the CUDA operators; auto (the default): where there is nvcc")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help=f"build {EMULATED_LIBRARY_NAME} alone: AVX-512 and AVX-VNNI in AVX2, for tests (scripts/test_emulated.sh)",
    )
    args = parser.parse_args()
    try:
        if args.emulated:
            build(args.output, args.jobs, emulated=True)
            return 0
        build(args.output, args.jobs)
        build_cuda(args.output, args.cuda)
    except BuildError as error:
        print(f"fastengine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
