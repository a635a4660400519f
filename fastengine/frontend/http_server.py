"""uvicorn without its clock: the main loop waits for a signal instead of looking ten times a second."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType
from typing import Any

import uvicorn

from fastengine.config import ServerConfig

# Longer than most clients and load balancers keep an idle connection, so that they close it, not we.
KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or :meth:`stop`; then lets running requests finish within the shutdown timeout."""

    def __init__(self, app: Any, server: ServerConfig):
        config = uvicorn.Config(
            app,
            loop="auto",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(server.shutdown_timeout)),
            ssl_certfile=server.ssl_certfile,
            ssl_keyfile=server.ssl_keyfile,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._exit = asyncio.Event()
        self.server_state.default_headers = self.config.encoded_headers
        if not self.should_exit:
            await self._exit.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded as captured: uvicorn would raise the signal again at the end, and the exit code be its number.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """Begin to shut down. May be called by a signal handler."""
        self.should_exit = True
        if self.started:
            self._loop.call_soon_threadsafe(self._exit.set)
