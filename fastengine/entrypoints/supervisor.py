"""The process a user starts: it owns the port and the other processes, and does nothing else.

::

    supervisor ──┬── engine ── launcher ── worker ranks
                 └── API process 0 .. N-1      (all accept on the one socket bound here)

It sleeps until a child ends, a signal comes or the engine reports its status, and a few times per
``--watchdog-timeout`` asks its children for a sign of life. A dead API process is started again; a dead engine ends
the server, or is started again with ``--restart-engine``. One that hangs is killed, and so is dead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque

import zmq
from tqdm import tqdm

from fastengine.config import ConfigError, EngineConfig
from fastengine.entrypoints.instance import STOP_MARGIN_S, EngineProcess, create_runtime
from fastengine.entrypoints.life_watch import LifeWatch, Subject, end_hanging
from fastengine.ipc.channels import ENCODER, INTAKE, client_name, push_socket
from fastengine.ipc.life_signs import ENGINE, LifeSigns, api_place
from fastengine.ipc.process import EXIT_HOPELESS, SignalInbox
from fastengine.observability.logs import set_log_level
from fastengine.protocol.outputs import EngineStatus
from fastengine.protocol.requests import ClientGone
from fastengine.protocol.supervision import ClientCheck, EngineCheck

logger = logging.getLogger(__name__)

# An API process (or engine) that dies more often than this within a minute is not started again, and the server ends.
MAX_RESTARTS_PER_MINUTE = 5
# What clients get to read that the engine is gone, when the server ends with it.
FAREWELL_S = 3.0
LISTEN_BACKLOG = 2048
EXIT_KILLED = 130


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, shared by all API processes. Raises ConfigError if the port can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError("host", f"{host}: {error}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"{host}:{port} can't be listened on: {error.strerror}; choose another with --port") from None
    return listener


class Restarts:
    """How often one process died within the last minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def allow(self) -> bool:
        now = time.monotonic()
        while self._times and self._times[0] < now - 60:
            self._times.popleft()
        self._times.append(now)
        return len(self._times) <= MAX_RESTARTS_PER_MINUTE

    def __str__(self) -> str:
        return f"it died {len(self._times)} times within a minute, and is started again {MAX_RESTARTS_PER_MINUTE} times a minute at most: the server ends"


class Supervisor:
    """Runs one server to its end; :meth:`run` returns the exit code."""

    def __init__(self, config: EngineConfig, listener: socket.socket):
        self.config = config
        self._listener = listener
        self._runtime = create_runtime(config)
        self._signals = SignalInbox(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._zmq = zmq.Context()
        self._intake = push_socket(self._zmq, self._runtime.ipc_address(INTAKE))
        self._apis: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, zmq.Socket] = {}  # to API processes, by index
        self._restarts: dict[str, Restarts] = {}
        self._progress: tqdm | None = None
        self._progress_logged = False
        self._was_ready = False
        self._last_state = ""
        self._log_level: str | None = None
        self._stopping = False
        self._engine_failed = False  # for good: only the API processes' last replies are waited for
        self._exit_code: int | None = None
        self._kill_at: float | None = None
        signs = LifeSigns(self._runtime, config.server.api_workers, create=True)
        self._life_watch = LifeWatch(signs, config.parallel.watchdog_timeout)
        self._hung: dict[int, str] = {}  # pid of a child that was killed because it hung -> what was seen
        self._engine = self._start_engine()

    def run(self) -> int:
        try:
            for index in range(self.config.server.api_workers):
                self._start_api(index)
            while self._exit_code is None:
                events = self._selector.select(self._until_due())
                for key, _ in events:
                    key.data()
                if self._life_watch.is_due and not self._stopping:
                    self._end_hung_children()
                if not events and self._kill_at is not None and time.monotonic() >= self._kill_at:
                    logger.error("the processes did not end in time: killing them")
                    self._exit_code = 1
            return self._exit_code
        finally:
            self._kill_everything()

    def _until_due(self) -> float | None:
        """Seconds until something is to be done without anybody's asking; None: never."""
        moments = [self._kill_at, None if self._stopping else self._life_watch.due_at]
        due = min((moment for moment in moments if moment is not None), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    # -- children -------------------------------------------------------------------------------

    def _start_engine(self) -> EngineProcess:
        engine = EngineProcess(self._runtime)
        self._selector.register(engine.status_fd, selectors.EVENT_READ, self._on_engine_status)
        return engine

    def _start_api(self, index: int) -> None:
        command = [sys.executable, "-m", "fastengine.frontend", "--runtime-dir", str(self._runtime.path)]
        command += ["--client-index", str(index), "--socket-fd", str(self._listener.fileno())]
        self._apis[index] = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[self._listener.fileno()], start_new_session=True)

    def _on_signals(self) -> None:
        for signum in self._signals.drain():
            if signum == signal.SIGINT and self._stopping:
                logger.warning("killed by a second Ctrl-C")
                self._exit_code = EXIT_KILLED
            elif signum == signal.SIGTERM and self._stopping:
                self._hurry()
            elif signum in (signal.SIGTERM, signal.SIGINT):
                self._begin_stop()
        self._reap()

    def _reap(self) -> None:
        for index, process in list(self._apis.items()):
            if process.poll() is not None:
                del self._apis[index]
                if not self._stopping:
                    self._api_died(index, process.pid, process.returncode)
        engine_code = self._engine.process.poll()
        if self._engine_failed:
            if not self._apis:
                self._exit_code = 1
        elif engine_code is not None and self._exit_code is None:
            self._engine_ended(engine_code)
        elif self._stopping and not self._apis:
            self._engine.end()

    def _api_died(self, index: int, pid: int, code: int) -> None:
        how = self._hung.pop(pid, None) or _how(code)
        channel = self._channels.pop(index, None)
        if channel is not None:
            channel.close(linger=0)  # what it has not read is not for its successor
        logger.error("API process %d died (%s); its requests are aborted", index, how)
        self._tell_engine(ClientGone(index, f"it died ({how})"))
        if code == EXIT_HOPELESS:
            self._fail(f"API process {index} can't do its work and would not the next time: see its message above")
        elif self._may_restart(f"api-{index}"):
            self._start_api(index)
        else:
            self._fail(f"API process {index}: {self._restarts[f'api-{index}']}")

    def _engine_ended(self, code: int) -> None:
        if self._stopping and not (self._apis and self._was_ready):
            self._exit_code = 0 if code == 0 else 1
            return
        hung = self._hung.pop(self._engine.process.pid, None)
        how = hung or _how(code)
        self._finish_progress()
        self._tell_apis(EngineStatus(state="failed", message=f"the engine process ended ({how})"))
        self._forget_status()
        self._engine.close()
        to_restart = self._was_ready and not self._stopping and self.config.server.restart_engine
        if to_restart and self._may_restart("engine"):
            logger.error("the engine process died (%s) and is started again", how)
            self._engine = self._start_engine()
        else:
            too_often = f"; {self._restarts['engine']}" if to_restart else ""
            self._fail(f"the engine process ended ({how}){'' if hung else _where_to_look(code)}{too_often}")
            if self._was_ready and self._apis:
                self._let_apis_answer()

    def _let_apis_answer(self) -> None:
        """The engine is gone for good, and the API processes know: their clients hear of it before they end."""
        self._engine_failed, self._exit_code = True, None
        self._kill_at = time.monotonic() + FAREWELL_S
        if not self._stopping:
            self._end_apis()

    def _may_restart(self, name: str) -> bool:
        return self._restarts.setdefault(name, Restarts()).allow()

    def _fail(self, message: str) -> None:
        logger.error("%s", message)
        self._exit_code = 1

    def _tell_engine(self, message: ClientGone | EngineCheck) -> None:
        with contextlib.suppress(zmq.Again):  # an engine that reads nothing has other troubles, and its next one hears of it all
            self._intake.send(ENCODER.encode(message), zmq.NOBLOCK)

    def _tell_api(self, index: int, message: EngineStatus | ClientCheck) -> None:
        if index not in self._channels:
            self._channels[index] = push_socket(self._zmq, self._runtime.ipc_address(client_name(index)))
        with contextlib.suppress(zmq.Again):  # it reads nothing, and will be noticed for it
            self._channels[index].send(ENCODER.encode(message), zmq.NOBLOCK)

    def _tell_apis(self, status: EngineStatus) -> None:
        for index in self._apis:
            self._tell_api(index, status)

    def _check_api(self, index: int, number: int) -> None:
        self._tell_api(index, ClientCheck(number))

    def _end_hung_children(self) -> None:
        subjects = [
            Subject(f"API process {index}", process.pid, api_place(index), functools.partial(self._check_api, index))
            for index, process in self._apis.items()
        ]
        subjects.append(Subject("the engine process", self._engine.process.pid, ENGINE, lambda number: self._tell_engine(EngineCheck(number))))
        for subject, reason in self._life_watch.round(subjects):
            logger.error("%s (pid %d) hangs: %s. It is killed; what it can still say of its threads follows", subject.name, subject.pid, reason)
            self._hung[subject.pid] = f"it hung: {reason}"
            end_hanging(subject.pid)

    # -- statuses -------------------------------------------------------------------------------

    def _on_engine_status(self) -> None:
        statuses = self._engine.read_statuses()
        if not statuses:  # the pipe is closed: SIGCHLD follows
            self._forget_status()
        for status in statuses:
            if status.state == "starting":
                self._show_progress(status.progress)
            elif status.state == "ready" and self._last_state != "ready":
                self._finish_progress()
                self._announce()
            if status.log_level != self._log_level:
                set_log_level(status.log_level or self.config.observability.log_level)
            self._last_state, self._log_level = status.state, status.log_level

    def _forget_status(self) -> None:
        if self._engine.status_fd in self._selector.get_map():
            self._selector.unregister(self._engine.status_fd)

    def _show_progress(self, progress: float) -> None:
        if not sys.stderr.isatty():  # a log: one line, and no bar that draws over itself
            if not self._progress_logged:
                logger.info("loading the weights")
                self._progress_logged = True
            return
        if self._progress is None:
            self._progress = tqdm(
                total=100, desc="Loading weights", unit="%", file=sys.stderr, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
            )
        self._progress.update(round(progress * 100) - self._progress.n)

    def _finish_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _announce(self) -> None:
        if self._was_ready:
            logger.info("the engine is ready again")
            return
        self._was_ready = True
        print(ready_message(self.config, self._listener.getsockname()[1]), flush=True)

    # -- the end --------------------------------------------------------------------------------

    def _begin_stop(self) -> None:
        """API processes stop accepting and finish what runs; the engine ends after the last of them."""
        if self._stopping:
            return
        logger.info("stopping: running requests have %.0f s to finish (Ctrl-C again to kill)", self.config.server.shutdown_timeout)
        self._kill_at = time.monotonic() + self.config.server.shutdown_timeout + STOP_MARGIN_S
        self._end_apis()
        if not self._apis or not self._was_ready:
            self._engine.terminate()

    def _end_apis(self) -> None:
        """They stop accepting and end when the last of their requests has."""
        self._stopping = True
        self._listener.close()
        for process in self._apis.values():
            process.terminate()

    def _hurry(self) -> None:
        """A second SIGTERM: running requests are told that it is over, and everything ends as soon as it can."""
        logger.warning("stopping at once: running requests are ended")
        self._kill_at = time.monotonic() + STOP_MARGIN_S
        for process in self._apis.values():
            process.terminate()
        if not self._apis:
            self._engine.end()

    def _kill_everything(self) -> None:
        for process in (*self._apis.values(), self._engine.process):
            if process.poll() is None:
                if process is self._engine.process:
                    process.terminate()  # it takes its launcher and workers along
                else:
                    process.kill()
        for process in (*self._apis.values(), self._engine.process):
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._zmq.destroy(linger=0)
        self._runtime.remove()


def _how(code: int) -> str:
    if code == -signal.SIGALRM:
        return "it hung for --watchdog-timeout seconds with work to do; where its threads stood is above"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _where_to_look(code: int) -> str:
    """What the engine's end needs to be understood: its own last words, or that there are none."""
    if code == -signal.SIGKILL:
        return ": somebody killed it, or the kernel did for want of memory (dmesg would say so); it left no message"
    if code == -signal.SIGALRM:
        return ""
    if code < 0:
        return f": it crashed; where its thread stood is above if Python could still tell ({signal.strsignal(-code)})"
    return ": its own last message is above"


def ready_message(config: EngineConfig, port: int) -> str:
    """What the console shows once the server answers: a command that works as it stands."""
    host = "127.0.0.1" if config.server.host in ("0.0.0.0", "::", "") else config.server.host
    scheme = "https" if config.server.ssl_certfile else "http"
    host = f"[{host}]" if ":" in host else host
    auth = ' -H "Authorization: Bearer $API_KEY"' if config.server.api_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Count from 1 to 20."}], "max_tokens": 64, "temperature": 0}'
    url = f"{scheme}://{host}:{port}"
    return f"fastengine is ready on {url} — try:\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} -d '{body}'"


def serve(config: EngineConfig) -> int:
    """Bind the port, run the server, return its exit code. Raises ConfigError before anything is started."""
    listener = bind(config.server.host, config.server.port)
    os.set_inheritable(listener.fileno(), True)
    return Supervisor(config, listener).run()
