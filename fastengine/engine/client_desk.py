"""ClientDesk: the API processes as the engine loop sees them: who they are, what they ask for, what they are owed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable

from fastengine.config import EngineConfig
from fastengine.engine.core import EngineCore
from fastengine.engine.evidence import Evidence
from fastengine.engine.intake import IntakeThread
from fastengine.engine.outbox import Outbox
from fastengine.ipc.life_signs import ENGINE, LifeSigns
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.ipc.worker_link import EngineBell
from fastengine.observability.watchdog import ThreadWatchdog
from fastengine.protocol.control import ControlResponse
from fastengine.protocol.outputs import EngineError, EngineStatus
from fastengine.protocol.requests import AbortRequest, ClientGone, ClientHello, ClientMessage, GenerateRequest
from fastengine.protocol.supervision import EngineCheck


class ClientDesk:
    """Owns the sockets to and from API processes. Used by the engine loop only, its intake thread aside.

    Requests that come before there is a core wait here; commands are refused until then.
    """

    def __init__(self, config: EngineConfig, runtime: RuntimeDir, bell: EngineBell, intake_watchdog: ThreadWatchdog, evidence: Evidence):
        self._config = config
        self._runtime = runtime
        self._evidence = evidence
        self._intake = IntakeThread(runtime, bell, intake_watchdog)
        self._outbox = Outbox(runtime)
        self._early: deque[ClientMessage] = deque()
        self._pids: dict[int, int] = {}  # by client; 0: a program of the user's
        self._life_signs: LifeSigns | None = None  # opened for the first check: an LLM's engine has no supervisor

    def start(self) -> None:
        self._intake.start()

    @property
    def has_news(self) -> bool:
        return self._intake.has_news

    @property
    def has_backlog(self) -> bool:
        """Something could not be sent yet: try again in a moment."""
        return self._outbox.has_backlog

    # -- what they send -------------------------------------------------------------------------

    def receive(self, core: EngineCore | None, status: Callable[[], EngineStatus]) -> None:
        """Take all that has come. ``status()`` is what a new client is told."""
        for command in self._intake.take_commands():
            if core is None:
                error = EngineError(503, f"the engine is {status().state}", retry_after_s=1.0)
                self._outbox.send(command.client_index, ControlResponse(request_id=command.request_id, error=error))
            else:
                core.control(command)
        for message in self._intake.take_requests():
            if isinstance(message, EngineCheck):
                self._answer(message)
                continue
            if isinstance(message, ClientHello):
                self._greet(message, status())
            elif isinstance(message, ClientGone):
                self._evidence.crashed(f"API process {message.client_index}", message.reason, {})
                self._pids.pop(message.client_index, None)
                self._outbox.drop(message.client_index)
            if core is None:
                self._early.append(message)
            else:
                self._admit(core, message)

    def admit_early(self, core: EngineCore) -> None:
        """What has come before there was a core."""
        while self._early:
            self._admit(core, self._early.popleft())

    def _answer(self, check: EngineCheck) -> None:
        if self._life_signs is None:
            self._life_signs = LifeSigns(self._runtime, self._config.server.api_workers)
        self._life_signs.answer(ENGINE, check.number)

    def _greet(self, hello: ClientHello, status: EngineStatus) -> None:
        self._pids[hello.client_index] = hello.pid
        self._outbox.open(hello.client_index)
        self._outbox.send(hello.client_index, status)

    @staticmethod
    def _admit(core: EngineCore, message: ClientMessage) -> None:
        if isinstance(message, GenerateRequest):
            core.add_request(message)
        elif isinstance(message, AbortRequest):
            core.abort_handles(message.client_index, message.handles, message.reason)
        else:  # a client that is gone, or its successor's hello: whatever the old one had running ends
            core.client_gone(message.client_index)

    # -- what they get --------------------------------------------------------------------------

    def deliver(self, core: EngineCore) -> None:
        """Send what the core owes them. A client that can't be reached any more loses its requests."""
        for index, batch in core.take_outputs().items():
            if not self._outbox.send(index, batch):
                core.client_gone(index)
        for index, response in core.take_responses():
            self._outbox.send(index, response)
        if self._outbox.has_backlog:
            self._outbox.flush()

    def broadcast(self, status: EngineStatus) -> None:
        self._outbox.broadcast(status)

    def have_stacks_dumped(self) -> None:
        """Each API process writes to its stderr where its threads stand."""
        for pid in self._pids.values():
            if pid:  # a program of the user's may not expect a signal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    def close(self, *, nobody_reads: bool = False) -> None:
        self._outbox.close(nobody_reads=nobody_reads)
        self._intake.close()
        if self._life_signs is not None:
            self._life_signs.close()
