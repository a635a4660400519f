"""Templates that requests bring, rendered apart from everything else, and with bounds on how long they delay one another.

::

    a template seen before ──▶ one at a time ──▶ a child process with hard limits
    a new one              ──▶ one at a time ──▶ another

Who has to wait too long, or finds too many waiting, is told to come again. A template that went over its limits counts
as new: whoever sends such ones delays only those that nobody has sent before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fastengine.frontend.errors import ApiError
from fastengine.text.chat_template import ChatTemplateOverLimit

MAX_WAITING = 16
MAX_WAIT_S = 5.0
MAX_KNOWN = 256


class _Lane:
    """One render at a time."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, render: Callable[[], str]) -> str:
        """Raises ApiError 429, and what ``render`` raises."""
        if self._num_waiting >= MAX_WAITING:
            raise _busy(f"{MAX_WAITING} requests with templates of their own are waiting")
        self._num_waiting += 1
        try:
            await asyncio.wait_for(self._turn.acquire(), MAX_WAIT_S)
        except asyncio.TimeoutError:
            raise _busy(f"templates of other requests have taken the {MAX_WAIT_S:g} s that this one could wait") from None
        finally:
            self._num_waiting -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, render)
        finally:
            self._turn.release()


def _busy(message: str) -> ApiError:
    return ApiError(429, f"chat_template: {message}", param="chat_template", retry_after_s=1.0)


class TemplateRenders:
    """Runs on one event loop."""

    def __init__(self) -> None:
        self._for_new, self._for_known = _Lane("render-new"), _Lane("render")
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def close(self) -> None:
        self._for_new.close()
        self._for_known.close()

    async def render(self, source: str, render: Callable[[], str]) -> str:
        """The text that ``render`` makes of the template ``source``. Raises ApiError 429, and what ``render`` raises."""
        key = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        lane = self._for_known if key in self._known else self._for_new
        try:
            text = await lane.run(render)
        except ChatTemplateOverLimit:
            self._known.pop(key, None)
            raise
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return text
