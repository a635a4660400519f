"""Grammars that requests bring: compiled here, to refuse bad ones, and then by the workers, before the request is sent.

::

    check(spec) ──▶ a thread compiles it ──▶ every rank compiles it, while steps go on ──▶ the request

So no step of anybody's waits for a compilation. Requests that need the same grammar at once share one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fastengine.frontend.errors import ApiError, bad_request
from fastengine.protocol.outputs import INVALID_GRAMMAR
from fastengine.protocol.requests import GrammarSpec
from fastengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastengine.text.grammar import GrammarCompiler

logger = logging.getLogger(__name__)
MAX_UNDER_WAY = 64
MAX_READY = 64
# Has every rank compile a grammar. Raises ApiError: 400 when it can't be, 503 when there are no workers now.
Prepare = Callable[[GrammarSpec], Awaitable[None]]


class GrammarChecks:
    """Runs on one event loop."""

    def __init__(self, prepare: Prepare | None = None):
        """``prepare`` None: nobody else compiles."""
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiler: GrammarCompiler | None = None
        self._under_way: dict[GrammarSpec, asyncio.Task[str | None]] = {}
        self._ready: OrderedDict[GrammarSpec, None] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def forget_workers(self) -> None:
        """The workers are new ones: what the last ones had compiled is to be prepared again."""
        self._ready.clear()

    async def check(self, param: str, spec: GrammarSpec, tokenizer: Tokenizer) -> None:
        """Return when ``spec`` is compiled everywhere. Raises ApiError: 400 naming ``param``, 429 when too many are under way, 504."""
        if spec in self._ready:
            self._ready.move_to_end(spec)
            return
        task = self._under_way.get(spec)
        if task is None:
            if len(self._under_way) >= MAX_UNDER_WAY:
                raise ApiError(429, f"{MAX_UNDER_WAY} grammars are waiting to be compiled", param=param, retry_after_s=1.0)
            task = self._under_way[spec] = asyncio.create_task(self._compile(spec, tokenizer))
            task.add_done_callback(lambda ended: self._ended(spec, ended))
        # Shielded: it may be one of several requests that wait for it.
        problem = await asyncio.shield(task)
        if problem is not None:
            raise bad_request(param, problem, code=INVALID_GRAMMAR)

    def _ended(self, spec: GrammarSpec, task: asyncio.Task[str | None]) -> None:
        del self._under_way[spec]
        if not task.cancelled():
            task.exception()  # looked at: those who waited for it may all be gone, and asyncio would complain to the log

    async def _compile(self, spec: GrammarSpec, tokenizer: Tokenizer) -> str | None:
        """What is wrong with the grammar, or None once it is compiled everywhere. Raises ApiError when the workers take too long."""
        problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._problem_with, spec, tokenizer)
        if problem is not None:
            return problem
        try:
            if self._prepare is not None:
                await self._prepare(spec)
        except ApiError as error:
            if error.status == 400:
                return error.message
            if error.status != 503:
                raise
            # The workers are being started again: they will compile it when the request comes to them.
            logger.debug("a grammar could not be prepared: %s", error.message)
            return None
        self._ready[spec] = None
        if len(self._ready) > MAX_READY:
            self._ready.popitem(last=False)
        return None

    def _problem_with(self, spec: GrammarSpec, tokenizer: Tokenizer) -> str | None:
        # Most servers never see a grammar: its library is loaded with the first one.
        from fastengine.text.grammar import GrammarCompiler, GrammarError

        try:
            if self._compiler is None:
                self._compiler = GrammarCompiler(tokenizer)
            self._compiler.check(spec)
        except GrammarError as error:
            return str(error)
        return None
