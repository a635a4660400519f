"""Commands to an engine under a test's driver, and what they answer."""

from __future__ import annotations

from fastengine.protocol.control import IsPaused
from tests.engine.driver import Driver, Received
from tests.engine.test_steps import prompt


def busy(driver: Driver, count: int = 4, turns: int = 5, max_tokens: int = 40) -> list[Received]:
    received = [driver.add(prompt(i, 10), max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
    for _ in range(turns):
        driver.turn()
    return received


def code(driver: Driver, request_id: str) -> int | None:
    response = driver.responses.get(request_id)
    return None if response is None else 200 if response.error is None else response.error.code


def call_code(driver: Driver, command: object) -> int:
    response = driver.call(command)  # type: ignore[arg-type]
    return 200 if response.error is None else response.error.code


def is_paused(driver: Driver) -> bool:
    return driver.call(IsPaused()).result["is_paused"]
