"""Logging of every process: one line a record, the process's role in it, to stderr. Stack dumps go there, too."""

from __future__ import annotations

import logging
import sys

from fastengine.observability.watchdog import enable_stack_dumps


def setup_logging(role: str, level: str) -> None:
    """Configure the root logger, and have SIGUSR1 write the stacks of all threads beside it.

    ``role`` names the process in every line (``engine``, ``api-0``, ...).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{role}] %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    enable_stack_dumps()


def set_log_level(level: str) -> None:
    """Of this process's own messages, not those of libraries."""
    logging.getLogger("fastengine").setLevel(level)
