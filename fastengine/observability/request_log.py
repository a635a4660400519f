"""What is written about requests: one log line each, and whole records that can be sent again.

A record file holds one JSON object a line; ``kind`` says what it is. Files of ``--dump-requests`` hold
requests only, crash reports (:mod:`fastengine.observability.crash_dump`) other kinds, too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fastengine.protocol.outputs import EngineError
from fastengine.protocol.requests import SamplingParams

logger = logging.getLogger(__name__)
REQUEST_KIND = "request"
_ENCODER = msgspec.json.Encoder()


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=REQUEST_KIND):
    """One sequence with all that is needed to send it again. Times are seconds; ``arrived_at_s`` is a Unix time.

    ``state`` is ``finished`` or where the request stood when the record was taken. ``seed`` is the one in
    use, drawn by the engine when the client gave none; None where only the engine knew it.
    """

    request_id: str
    parent_id: str | None = None
    index: int = 0
    client_index: int
    state: str
    finish_reason: str | None = None
    error: EngineError | None = None
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    seed: int | None
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    arrived_at_s: float
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    weight_version: str = ""


class OtherLine(msgspec.Struct, frozen=True):
    kind: str


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """Append each of ``lines`` as JSON. Only the owner may read the file: it holds what users wrote."""
    path.touch(mode=0o600)
    with path.open("ab") as file:
        for line in lines:
            file.write(_ENCODER.encode(line) + b"\n")


def read_requests(path: Path) -> Iterator[RequestRecord]:
    """The requests of a record file, in its order. Raises OSError, or ValueError naming the line that is none of ours."""
    decode_kind = msgspec.json.Decoder(OtherLine).decode
    decode = msgspec.json.Decoder(RequestRecord).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if decode_kind(line).kind == REQUEST_KIND:
                    yield decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


class RequestDumper:
    """Writes finished requests in batches of ``every``, one file each, from a thread of its own."""

    def __init__(self, directory: Path, name: str, every: int):
        self._directory = directory
        self._name = name
        self._every = every
        self._pending: list[Callable[[], RequestRecord]] = []
        self._batches: queue.SimpleQueue[list[Callable[[], RequestRecord]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="request-dumper", daemon=True)
        self._thread.start()

    def add(self, record: Callable[[], RequestRecord]) -> None:
        """Take one request; ``record`` is called later, by the thread."""
        self._pending.append(record)
        if len(self._pending) >= self._every:
            self._hand_over()

    def close(self) -> None:
        """Write what is left."""
        if self._pending:
            self._hand_over()
        self._batches.put(None)
        self._thread.join()

    def _hand_over(self) -> None:
        self._batches.put(self._pending)
        self._pending = []

    def _run(self) -> None:
        number = 0
        while (batch := self._batches.get()) is not None:
            number += 1
            path = self._directory / f"requests-{self._name}-{number:06}.jsonl"
            try:
                append_lines(path, (record() for record in batch))
            except OSError as error:  # a full disk must not stop the engine
                logger.error("could not write %d requests to %s: %s", len(batch), path, error)
