"""HTTP counters of all API processes, exact in one scrape of any of them.

Each process counts into its own small file in the runtime directory (tmpfs, mapped); whoever is
scraped adds up all files. A process that is started again goes on with its predecessor's counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastengine.ipc.runtime_dir import RuntimeDir

STATUSES = (200, 204, 400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 429, 431, 499, 500, 501, 503, 504, 505)
OTHER = "other"
COUNTER_DTYPE = np.dtype("<i8")


class HttpMetrics:
    """Requests by route and status, and the streams that are open now (``int64``, one writer per file)."""

    def __init__(self, runtime_dir: RuntimeDir, client_index: int):
        self._dir = runtime_dir
        self._index = client_index
        self._routes: dict[str, int] = {}

    def open(self, routes: list[str]) -> None:
        """Map this process's file; ``routes`` must be the same in every process of the instance."""
        self._routes = {route: row for row, route in enumerate([*routes, OTHER])}
        shape = (len(self._routes), len(STATUSES) + 1)
        path = self._path(self._index)
        size = COUNTER_DTYPE.itemsize * shape[0] * shape[1]
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(bytes(size))
        self._counts = np.memmap(path, COUNTER_DTYPE, "r+", shape=shape)

    def count(self, route: str, status: int) -> None:
        row = self._routes.get(route, self._routes[OTHER])
        column = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        self._counts[row, column] += 1

    def count_refused(self, status: int) -> None:
        """A request that came to no route."""
        self.count(OTHER, status)

    def render(self) -> str:
        """Prometheus text: the sums over all API processes."""
        total = np.zeros_like(np.asarray(self._counts))
        for path in self._files():
            if path.stat().st_size == total.nbytes:
                total += np.fromfile(path, COUNTER_DTYPE).reshape(total.shape)
        lines = [
            "# HELP fastengine:http_requests_total HTTP requests by route and status, over all API processes.",
            "# TYPE fastengine:http_requests_total counter",
        ]
        for route, row in self._routes.items():
            for column, status in enumerate((*STATUSES, OTHER)):
                if total[row, column]:
                    lines.append(f'fastengine:http_requests_total{{route="{route}",status="{status}"}} {total[row, column]}')
        return "\n".join(lines) + "\n"

    def _path(self, index: int) -> Path:
        return self._dir.file(f"http-{index}.counters")

    def _files(self) -> Iterator[Path]:
        return self._dir.path.glob("http-*.counters")
