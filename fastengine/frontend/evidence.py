"""RequestHistory: what an API process knows of its requests, for the report of an engine's death that left it without words.

An engine that fails writes its own report (:mod:`fastengine.engine.evidence`), and knows more. One that was killed, or hung
and was ended, can't: then each API process writes what it has asked for and received.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastengine.config import EngineConfig
from fastengine.observability.crash_dump import write_crash_dump
from fastengine.observability.recent import Recent
from fastengine.observability.request_log import RequestRecord
from fastengine.protocol.outputs import EngineError, FinishReason, TokenOutput
from fastengine.protocol.requests import GenerateRequest
from fastengine.protocol.tokens import unpack_token_ids


class SentRequest:
    """One sequence as its sender sees it. ``token_ids`` grows with its output."""

    __slots__ = ("ended_at", "error", "finish_reason", "first_token_at", "num_cached_tokens", "request", "sent_at", "token_ids")

    def __init__(self, request: GenerateRequest, now: float):
        self.request = request
        self.token_ids: list[int] = []
        self.sent_at = now  # time.monotonic(), like all times here
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.num_cached_tokens = 0

    def take(self, output: TokenOutput) -> None:
        """A detailed output; the first one of every sequence is."""
        self.token_ids += output.token_ids
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
            self.first_token_at = time.monotonic()

    def record(self, now: float, weight_version: str) -> RequestRecord:
        asked = self.request
        first = self.first_token_at
        return RequestRecord(
            request_id=asked.request_id,
            parent_id=asked.parent_id,
            index=asked.index,
            client_index=asked.client_index,
            state="finished" if self.finish_reason is not None else "running" if self.token_ids else "waiting",
            finish_reason=self.finish_reason,
            error=self.error,
            prompt_token_ids=unpack_token_ids(asked.prompt_token_ids).tolist(),
            output_token_ids=self.token_ids,
            sampling=asked.sampling,
            seed=asked.sampling.seed,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            cache_salt=asked.cache_salt,
            arrived_at_s=asked.arrival_time_s,
            first_token_s=None if first is None else round(first - self.sent_at, 6),
            total_s=round((self.ended_at or now) - self.sent_at, 6),
            num_cached_tokens=self.num_cached_tokens,
            weight_version=weight_version,
        )


class RequestHistory:
    """The last minutes' requests of one API process, and the report made of them."""

    def __init__(self, config: EngineConfig, instance: str, client_index: int, directory: Path):
        self._config = config
        self._instance = instance
        self._client_index = client_index
        self._directory = directory
        self._recent: Recent[SentRequest] = Recent()

    @classmethod
    def of(cls, config: EngineConfig, instance: str, client_index: int) -> RequestHistory | None:
        """None unless ``--crash-dump-dir`` asks for reports."""
        directory = config.observability.crash_dump_dir
        return None if directory is None else cls(config, instance, client_index, Path(directory))

    def sent(self, request: GenerateRequest) -> SentRequest:
        """To be told what becomes of it, and in the end to :meth:`ended`."""
        return SentRequest(request, time.monotonic())

    def ended(self, sent: SentRequest, reason: FinishReason, error: EngineError | None = None) -> None:
        sent.ended_at = time.monotonic()
        sent.finish_reason, sent.error = reason, error
        self._recent.add(sent, len(sent.token_ids) + len(sent.request.prompt_token_ids) // 4, sent.ended_at)

    def engine_died(self, reason: str, unfinished: Iterable[SentRequest], weight_version: str) -> Path | None:
        """Write the report; returns its path, None when it can't be written."""
        instance = f"{self._instance}-api{self._client_index}"
        return write_crash_dump(self._directory, instance, "engine", reason, self._config.flat(), {}, self._records(unfinished, weight_version))

    def _records(self, unfinished: Iterable[SentRequest], weight_version: str) -> Iterator[RequestRecord]:
        now = time.monotonic()
        for sent in (*self._recent.since(now), *unfinished):
            yield sent.record(now, weight_version)
