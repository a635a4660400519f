"""A few at a time, in order, and whoever does not pass through is not kept waiting."""

from __future__ import annotations

import asyncio

from fastengine.frontend.turnstile import PER_TURN, Turnstile


def test_a_crowd_goes_in_a_few_at_a_time_and_in_order() -> None:
    async def test() -> None:
        turnstile, entered = Turnstile(), []

        async def arrive(number: int) -> None:
            await turnstile.enter()
            entered.append(number)

        crowd = [asyncio.create_task(arrive(i)) for i in range(20 * PER_TURN)]
        counts = []
        while len(entered) < len(crowd):
            await asyncio.sleep(0)  # one turn of the loop
            counts.append(len(entered))
        assert entered == list(range(len(crowd)))
        assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) <= PER_TURN
        await turnstile.enter()

    asyncio.run(test())


def test_few_do_not_wait() -> None:
    async def test() -> None:
        turnstile = Turnstile()
        for _ in range(3):
            for _ in range(PER_TURN):
                entering = turnstile.enter()
                try:
                    entering.send(None)
                except StopIteration:
                    continue
                raise AssertionError("had to wait")
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(test())


def test_who_gives_up_takes_nobodys_turn() -> None:
    async def test() -> None:
        turnstile = Turnstile()
        tasks = [asyncio.create_task(turnstile.enter()) for _ in range(2 * PER_TURN + 3)]
        await asyncio.sleep(0)
        waiting = [task for task in tasks if not task.done()]
        assert len(waiting) == PER_TURN + 3
        for task in waiting[:3]:
            task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert [task.cancelled() for task in waiting] == [True] * 3 + [False] * PER_TURN
        assert all(task.done() for task in waiting)

    asyncio.run(test())
