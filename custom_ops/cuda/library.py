"""Finds and loads the compiled CUDA operators."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import paddle
from paddle.base import core

from fastengine.custom_ops.library import LibraryUnavailable

LIBRARY_PATH = Path(__file__).resolve().parent.parent / "libfastengine_cuda.so"


def load(path: Path = LIBRARY_PATH) -> None:
    """Registers the operators with Paddle under ``fastengine_cuda_<name>``.

    Raises LibraryUnavailable when this Paddle has no CUDA, or the library was not built or does not fit it.
    """
    if not paddle.is_compiled_with_cuda():
        raise LibraryUnavailable("this Paddle was built without CUDA")
    load_whatever_paddle(path)


def load_whatever_paddle(path: Path) -> None:
    """The same without asking whether this Paddle has CUDA: tests load a build for the CPU."""
    if not path.is_file():
        raise LibraryUnavailable(f"{path.name} was not built (build it with: python custom_ops/setup_ops.py)")
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise LibraryUnavailable(f"{path} does not load, perhaps it was built for another Paddle: {error}") from error
    core.load_op_meta_info_and_register_op(str(path))
