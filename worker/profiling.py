"""Paddle's profiler around the steps between two commands, and the trace file it leaves.

Beside Paddle's own operators a trace has the parts of each step: ``prepare``, ``forward`` or ``fused step``, and ``sample``.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import paddle

# What visualisers know Paddle's traces by.
SUFFIX = ".paddle_trace.json"


class OutputDirError(ValueError):
    """No trace can be written there."""


class StepProfiler:
    """Takes one profile at a time, of the process it is in."""

    def __init__(self, rank: int, *, gpu: bool):
        self._rank = rank
        self._targets = [paddle.profiler.ProfilerTarget.CPU]
        if gpu:
            self._targets.append(paddle.profiler.ProfilerTarget.GPU)
        self._profiler: paddle.profiler.Profiler | None = None
        self._file = Path()

    def start(self, output_dir: str | None) -> Path:
        """The absolute directory that the trace will stand in: one per rank under ``output_dir``, made if need be.

        Raises OutputDirError when no file can be made there, ValueError while a profile is taken.
        """
        if self._profiler is not None:
            raise ValueError("a profile is being taken already")
        directory = self._writable(output_dir)
        self._file = directory / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-pid{os.getpid()}-{time.monotonic_ns()}{SUFFIX}"
        self._profiler = paddle.profiler.Profiler(targets=self._targets, on_trace_ready=self._write)
        self._profiler.start()
        return directory

    def stop(self) -> Path:
        """The trace file. Raises ValueError when no profile is being taken, OSError when the file could not be written."""
        if self._profiler is None:
            raise ValueError("no profile is being taken")
        profiler, self._profiler = self._profiler, None  # there can be another only when this one is gone
        profiler.stop()
        if not self._file.is_file():  # Paddle says so in the log alone
            raise OSError(f"{self._file} could not be written")
        return self._file

    def _write(self, profiler: paddle.profiler.Profiler) -> None:
        profiler.export(str(self._file), "json")

    def _writable(self, output_dir: str | None) -> Path:
        if not output_dir:
            raise OutputDirError("output_dir: a directory is needed")
        try:
            directory = Path(output_dir).absolute() / f"rank-{self._rank}"
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputDirError(f"output_dir: {output_dir!r} can't be written to: {reason}") from None
        return directory
