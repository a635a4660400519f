"""Cancelling a response in whichever API process works on it.

::

    asked process --"resp_...\n"--> responses-I, the socket of process I
                  <----"done\n"---- once what it had said is stored

The answer comes when the record has been written: who reads it then finds what every later reader will.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from fastengine.frontend.errors import ApiError
from fastengine.ipc.runtime_dir import RuntimeDir

# A process that is not heard of for so long hangs: its watchdog will end it.
TIMEOUT_S = 10.0
MAX_LINE_BYTES = 256
DONE = b"done\n"

Cancel = Callable[[str], Awaitable[None]]


class CancelDesk:
    """One API process's side of it. ``cancel`` is given a response's id, and returns when that response has come to its end."""

    def __init__(self, runtime_dir: RuntimeDir, client_index: int, cancel: Cancel):
        self._runtime_dir = runtime_dir
        self._client_index = client_index
        self._cancel = cancel
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Listen, if it doesn't yet: called before the first response that could be cancelled is seen by anybody."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._answer, self._address(self._client_index), limit=MAX_LINE_BYTES)

    async def ask(self, client_index: int, response_id: str) -> None:
        """Wait until process ``client_index`` no longer works on the response, or is gone. Raises ApiError 504."""
        try:
            await asyncio.wait_for(self._ask(client_index, response_id), TIMEOUT_S)
        except asyncio.TimeoutError:
            message = f"the process that works on this response did not answer within {TIMEOUT_S:g} s"
            raise ApiError(504, f"response_id: {message}", param="response_id") from None

    async def _ask(self, client_index: int, response_id: str) -> None:
        # The process may be dead, or die meanwhile: then it works on nothing. The deadline is not in here: its error is an OSError, too.
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(self._address(client_index), limit=MAX_LINE_BYTES)
            try:
                writer.write(response_id.encode() + b"\n")
                await reader.readline()
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._cancel((await reader.readline()).decode().rstrip("\n"))
            writer.write(DONE)
        finally:
            writer.close()

    def _address(self, client_index: int) -> str:
        return str(self._runtime_dir.file(f"responses-{client_index}"))
