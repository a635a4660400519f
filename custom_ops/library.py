"""Finds and loads the compiled CPU operators, and talks to the part of them that is not an operator."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from paddle.base import core

# FASTENGINE_CPU_LIBRARY: another build's, as scripts/test_emulated.sh has.
LIBRARY_PATH = Path(os.environ.get("FASTENGINE_CPU_LIBRARY") or Path(__file__).resolve().parent / "libfastengine_cpu.so")


class LibraryUnavailable(Exception):
    """The compiled operators can't be used here; the text says why."""


@dataclass(frozen=True)
class Library:
    """The loaded library; its operators are registered with Paddle under ``fastengine_<name>``."""

    handle: ctypes.CDLL

    @property
    def isa(self) -> str:
        """The instruction set in use, ``avx512``, ``avxvnni`` (AVX2 with the int8 dot product) or ``avx2``."""
        return str(self.handle.fastengine_isa().decode())

    @property
    def operators_isa(self) -> str:
        """Which of them the operators outside of the fused step run: they have no version for ``avxvnni``."""
        return "avx2" if self.isa == "avxvnni" else self.isa

    def use_isa(self, name: str) -> bool:
        """Switches to another instruction set (tests compare them), for fused models made later as well; False if this processor lacks it."""
        return bool(self.handle.fastengine_use_isa(name.encode()))

    def force_isa(self, name: str) -> bool:
        """:meth:`use_isa` also of an ``avxvnni`` that the processor has and CPUID does not show, as on some virtual machines; a child process tries it."""
        return bool(self.handle.fastengine_force_isa(name.encode()))

    @property
    def num_threads(self) -> int:
        return int(self.handle.fastengine_num_threads())

    def set_num_threads(self, num_threads: int) -> None:
        self.handle.fastengine_set_num_threads(num_threads)


def load(path: Path = LIBRARY_PATH) -> Library:
    """Loads the library and registers its operators: about a millisecond.

    Raises LibraryUnavailable when it was not built, does not fit this Paddle, or needs another processor.
    """
    if not path.is_file():
        raise LibraryUnavailable(f"{path.name} was not built (build it with: python custom_ops/setup_ops.py)")
    try:
        handle = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise LibraryUnavailable(f"{path} does not load, perhaps it was built for another Paddle: {error}") from error
    handle.fastengine_isa.restype = ctypes.c_char_p
    handle.fastengine_set_num_threads.restype = None
    library = Library(handle)
    if not library.isa:
        raise LibraryUnavailable("this processor has neither AVX-512 nor AVX2 with FMA")
    core.load_op_meta_info_and_register_op(str(path))
    library.set_num_threads(len(os.sched_getaffinity(0)))
    return library
