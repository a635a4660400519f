"""FrontEnd: the parts of one API process, for the routes to use."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, field

from fastengine.config import EngineConfig
from fastengine.frontend.engine_client import EngineClient
from fastengine.frontend.errors import engine_unavailable
from fastengine.frontend.http_metrics import HttpMetrics
from fastengine.frontend.load_board import LoadBoard
from fastengine.frontend.request_manager import RequestManager
from fastengine.frontend.request_traces import RequestTraces
from fastengine.frontend.text_service import ModelText, TextService
from fastengine.model_files.load import default_model_name
from fastengine.observability.logs import set_log_level
from fastengine.protocol.outputs import EngineStatus


@dataclass(frozen=True)
class FrontEnd:
    config: EngineConfig
    engine: EngineClient
    manager: RequestManager
    text: TextService
    http_metrics: HttpMetrics
    board: LoadBoard
    traces: RequestTraces | None = None  # what --otlp-endpoint asks for
    started_s: float = field(default_factory=time.time)

    @functools.cached_property
    def served_names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is what replies call it."""
        model = self.config.model
        return model.served_model_name or (default_model_name(model.model),)

    @property
    def max_body_bytes(self) -> int:
        return int(self.config.server.max_body_mib * 2**20)

    def start(self) -> asyncio.Task[ModelText]:
        """Connect to the engine and begin to load the text side; call it on the event loop. The task is the loading."""
        self.engine.start(on_outputs=self.manager.on_outputs, on_status=self._status_changed)
        return self.text.start()

    def _status_changed(self, before: EngineStatus, now: EngineStatus) -> None:
        if now.state != "ready":
            self.text.grammars.forget_workers()
        if now.log_level != before.log_level:
            set_log_level(now.log_level or self.config.observability.log_level)
        self.manager.on_status(before, now)

    def begin_shutdown(self) -> None:
        """The server finishes what runs and takes nothing new."""
        self.manager.begin_shutdown()

    def end_requests(self) -> int:
        """The server shuts down: whoever still waits is told so. Returns how many those are."""
        error = engine_unavailable("the server is shutting down", retry_after_s=10)
        return self.manager.end_all(error) + self.engine.fail_commands(error)

    def close(self) -> None:
        self.engine.close()
        self.text.close()
        if self.traces is not None:
            self.traces.close()
