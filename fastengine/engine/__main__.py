"""``python -m fastengine.engine``: the engine process, started by the supervisor or by LLM."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys

import msgspec

from fastengine.config import EngineConfig
from fastengine.engine.request_state import ModelLimits
from fastengine.engine.service import EngineFailed, EngineService
from fastengine.ipc.process import die_with_parent, wake_without_preempting
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.model_files.load import load_spec
from fastengine.observability.logs import setup_logging
from fastengine.protocol.outputs import EngineStatus

logger = logging.getLogger("fastengine.engine")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fastengine.engine")
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--status-fd", type=int, required=True, help="statuses are written here, one JSON object a line")
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    # The handler stands before the parent is watched: from here on, its death means a clean end.
    service: EngineService | None = None
    asked_to_stop = False

    def orphaned() -> bool:
        return os.getppid() != args.parent_pid

    def stop(signum: int, frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        if service is not None:
            nobody_waits = orphaned() or signum == signal.SIGUSR2
            service.request_stop(0.0 if nobody_waits else config.server.shutdown_timeout, nobody_reads=nobody_waits)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR2, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the supervisor's to handle
    runtime = RuntimeDir.join(args.runtime_dir)
    config = EngineConfig.from_json(runtime.file("config.json").read_bytes())
    setup_logging("engine", config.observability.log_level)
    die_with_parent(args.parent_pid, signal.SIGTERM)
    wake_without_preempting()

    state = "starting"

    def report(status: EngineStatus) -> None:
        nonlocal state
        if status.state == "ready" and state != "ready":
            # The books of all KV blocks stay for good. With some hundred thousand of them, looking for cycles there takes longer than a step.
            gc.collect()
            gc.freeze()
        state = status.state
        with contextlib.suppress(BrokenPipeError):  # the parent is gone: SIGTERM is on its way
            os.write(args.status_fd, msgspec.json.encode(status) + b"\n")

    try:
        spec = load_spec(config.model.model)
        service = EngineService(config, runtime, ModelLimits.of(config, spec), report)
        if asked_to_stop:
            service.request_stop(0.0)
        service.run()
    except EngineFailed as failure:
        logger.error("%s", failure)
        return 1
    finally:
        if orphaned():  # nobody else is left to clean up
            runtime.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
