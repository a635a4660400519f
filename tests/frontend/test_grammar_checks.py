"""Grammars are compiled here, then by the workers, and only then is a request sent that needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fastengine.frontend.errors import ApiError
from fastengine.frontend.grammar_checks import MAX_UNDER_WAY, GrammarChecks
from fastengine.protocol.control import PrepareGrammar
from fastengine.protocol.requests import GrammarSpec
from tests.frontend.harness import ByteTokenizer, say

GOOD = GrammarSpec("regex", "a+")
TOKENIZER = ByteTokenizer()


class Workers:
    """Ranks that answer when a test lets them, with ``error`` if there is one."""

    def __init__(self) -> None:
        self.asked: list[GrammarSpec] = []
        self.go = asyncio.Event()
        self.error: ApiError | None = None

    async def prepare(self, spec: GrammarSpec) -> None:
        self.asked.append(spec)
        await self.go.wait()
        if self.error is not None:
            raise self.error


def with_checks(test: Callable[[GrammarChecks, Workers], Awaitable[None]]) -> None:
    async def run() -> None:
        workers = Workers()
        checks = GrammarChecks(workers.prepare)
        try:
            await test(checks, workers)
        finally:
            checks.close()

    asyncio.run(run())


def test_requests_wait_for_the_workers_and_share_one_compilation() -> None:
    async def test(checks: GrammarChecks, workers: Workers) -> None:
        tasks = [asyncio.create_task(checks.check("guided_regex", GOOD, TOKENIZER)) for _ in range(3)]
        while not workers.asked:
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(checks.check("guided_regex", GOOD, TOKENIZER)))
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks[1:])
        workers.go.set()
        await asyncio.gather(*tasks[1:])
        await checks.check("guided_regex", GOOD, TOKENIZER)
        assert workers.asked == [GOOD]
        checks.forget_workers()
        await checks.check("guided_regex", GOOD, TOKENIZER)
        assert workers.asked == [GOOD, GOOD]

    with_checks(test)


def test_bad_grammars_never_reach_the_workers() -> None:
    async def test(checks: GrammarChecks, workers: Workers) -> None:
        with pytest.raises(ApiError, match="guided_regex: ") as caught:
            await checks.check("guided_regex", GrammarSpec("regex", "("), TOKENIZER)
        assert (caught.value.status, caught.value.param) == (400, "guided_regex")
        assert workers.asked == []

    with_checks(test)


@pytest.mark.parametrize(("status", "raised"), [(400, 400), (503, None), (504, 504)])
def test_what_the_workers_say(status: int, raised: int | None) -> None:
    async def test(checks: GrammarChecks, workers: Workers) -> None:
        workers.error = ApiError(status, "rank 0: no")
        workers.go.set()
        try:
            await checks.check("guided_regex", GOOD, TOKENIZER)
            outcome = None
        except ApiError as error:
            outcome = error.status
        assert outcome == raised
        workers.error = None
        await checks.check("guided_regex", GOOD, TOKENIZER)
        assert workers.asked == [GOOD, GOOD]  # nothing was remembered that is not there

    with_checks(test)


def test_too_many_waiting_grammars_are_refused() -> None:
    async def test(checks: GrammarChecks, workers: Workers) -> None:
        specs = [GrammarSpec("regex", f"a{i}") for i in range(MAX_UNDER_WAY + 1)]
        tasks = [asyncio.create_task(checks.check("guided_regex", spec, TOKENIZER)) for spec in specs]
        with pytest.raises(ApiError) as caught:
            await tasks[-1]
        assert caught.value.status == 429
        workers.go.set()
        assert await asyncio.gather(*tasks[:-1]) == [None] * MAX_UNDER_WAY

    with_checks(test)


def test_the_workers_hear_of_a_grammar_before_the_request_is_sent(start_server) -> None:
    server = start_server()
    generated_before: list[int] = []
    take_command = server.engine._take_command

    def recorded(request) -> None:
        if isinstance(request.command, PrepareGrammar):
            assert request.command.grammar == GOOD
            generated_before.append(len(server.engine.generated))
        take_command(request)

    server.engine._take_command = recorded
    server.engine.script = say("aa")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "guided_regex": "a+"}
    for _ in range(2):
        assert server.http.post("/v1/completions", json=body).status_code == 200
    assert generated_before == [0]
    assert len(server.engine.generated) == 2
    server.engine.set_state("recovering")
    server.engine.set_state("ready")
    server.wait_ready()
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert generated_before == [0, 2]
