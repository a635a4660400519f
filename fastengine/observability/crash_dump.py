"""Crash reports: what is needed to understand a crash and to make it happen again, as JSON lines.

::

    {"kind": "crash", "what": "worker", "reason": ..., "time_s": ..., "version": ..., "instance": ...}
    {"kind": "config", "flags": {...}}                            secrets hidden
    {"kind": "traceback", "process": "worker rank 0", "text": ...}
    {"kind": "request", ...}                                      RequestRecord: recent ones, then unfinished ones
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from fastengine.observability.request_log import RequestRecord, append_lines
from fastengine.version import __version__

logger = logging.getLogger(__name__)


def write_crash_dump(
    directory: Path,
    instance: str,
    what: str,
    reason: str,
    flags: Mapping[str, Any],
    tracebacks: Mapping[str, str],
    requests: Iterable[RequestRecord],
) -> Path | None:
    """Write the report of one crash of ``what`` (``worker``, ``engine``); returns its path, None when it can't be written.

    ``tracebacks``: process -> text.
    """
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    path = directory / f"crash-{instance}-{stamp}-{round(now % 1 * 1e6):06}.jsonl"
    versions = {"version": __version__, "python": platform.python_version(), "platform": platform.platform()}
    head: list[dict[str, Any]] = [
        {"kind": "crash", "what": what, "reason": reason, "time_s": now, "instance": instance, **versions},
        {"kind": "config", "flags": flags},
        *({"kind": "traceback", "process": process, "text": text} for process, text in tracebacks.items()),
    ]
    try:
        append_lines(path, chain(head, requests))
    except OSError as error:  # the crash itself must still be handled
        logger.error("could not write the crash report %s: %s", path, error)
        return None
    logger.error("wrote the crash report %s", path)
    return path
