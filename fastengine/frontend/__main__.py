"""An API process: ``python -m fastengine.frontend --runtime-dir DIR --client-index I --socket-fd FD``.

It serves HTTP on a listening socket it inherits, and ends with its parent. The exit code is EXIT_HOPELESS
when the model's tokenizer can't be loaded, 0 after SIGTERM. An event loop that hangs while a request is open
ends the process with its stacks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import socket

from fastengine.config import EngineConfig
from fastengine.entrypoints.api_app import create_app
from fastengine.frontend.engine_client import EngineClient
from fastengine.frontend.evidence import RequestHistory
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.http_metrics import HttpMetrics
from fastengine.frontend.http_server import HttpServer
from fastengine.frontend.load_board import LoadBoard
from fastengine.frontend.request_manager import RequestManager
from fastengine.frontend.request_traces import RequestTraces
from fastengine.frontend.shares import Shares
from fastengine.frontend.text_service import ModelText, TextService, load_model_text
from fastengine.ipc.process import EXIT_HOPELESS, die_with_parent, wake_without_preempting
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.observability.logs import setup_logging
from fastengine.observability.watchdog import EventLoopWatchdog

logger = logging.getLogger("fastengine.frontend")
# Every token makes and drops a few objects of a stream that lives on: looking for cycles among them is seldom worth it.
# The second is what bounds the cycles that ended requests leave: some three thousand objects a round of the youngest.
GC_THRESHOLDS = (20_000, 5, 20)


def build_front_end(config: EngineConfig, runtime_dir: RuntimeDir, client_index: int) -> FrontEnd:
    engine = EngineClient(runtime_dir, client_index, config.server.api_workers)
    traces = RequestTraces.of(config, runtime_dir.instance_id, client_index)
    server, board = config.server, LoadBoard(runtime_dir, client_index)
    manager = RequestManager(
        engine,
        default_timeout_s=server.request_timeout,
        reject_while_paused=server.reject_while_paused,
        traces=traces,
        history=RequestHistory.of(config, runtime_dir.instance_id, client_index),
        board=board,
    )
    text = TextService(lambda: load_model_text(config.model), engine.prepare_grammar)
    return FrontEnd(config, engine, manager, text, HttpMetrics(runtime_dir, client_index), board, traces)


async def serve(front: FrontEnd, listener: socket.socket, shares: Shares | None) -> int:
    """Run until a signal comes; the exit code."""
    watchdog = EventLoopWatchdog(front.config.parallel.watchdog_timeout)
    server = HttpServer(
        watchdog.over(create_app(front)),
        front.config.server,
        begin_shutdown=front.begin_shutdown,
        end_requests=front.end_requests,
        on_refused=front.http_metrics.count_refused,
        shares=shares,
    )
    exit_code = 0

    def text_loaded(loading: asyncio.Task[ModelText]) -> None:
        nonlocal exit_code
        if loading.cancelled():
            return
        error = loading.exception()
        if error is not None:
            logger.error("the model's tokenizer can't be used: %s", error)
            exit_code = EXIT_HOPELESS
            server.stop()
        else:
            # What start-up made stays for good: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)

    loading = front.start()
    loading.add_done_callback(text_loaded)
    try:
        await server.serve([listener])
    finally:
        front.close()
    return exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fastengine.frontend", allow_abbrev=False)
    parser.add_argument("--runtime-dir", required=True, metavar="DIR", help="The instance's runtime directory.")
    parser.add_argument("--client-index", type=int, required=True, metavar="I", help="Which API process of the instance this is.")
    parser.add_argument("--socket-fd", type=int, required=True, metavar="FD", help="Inherited descriptor of the listening socket.")
    args = parser.parse_args()
    die_with_parent(os.getppid())
    wake_without_preempting()
    runtime_dir = RuntimeDir.join(args.runtime_dir)
    config = EngineConfig.from_json(runtime_dir.file("config.json").read_bytes())
    setup_logging(f"api-{args.client_index}", config.observability.log_level)
    listener = socket.socket(fileno=args.socket_fd)
    front = build_front_end(config, runtime_dir, args.client_index)
    with contextlib.suppress(ImportError):  # not built for every platform
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    shares = Shares.of(runtime_dir, args.client_index, config.server.api_workers)
    return asyncio.run(serve(front, listener, shares))


if __name__ == "__main__":
    raise SystemExit(main())
