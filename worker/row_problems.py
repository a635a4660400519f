"""Why one row of a step can't go on, while the others do."""

from __future__ import annotations

from typing import NamedTuple

from fastengine.protocol.outputs import INVALID_GRAMMAR

BAD_REQUEST, INTERNAL = 400, 500


class RowProblem(NamedTuple):
    """An HTTP status, what to tell the client, and EngineError's reason where there is one: a RowError without its slot."""

    code: int
    message: str
    reason: str | None = None


NOT_FINITE = RowProblem(INTERNAL, "the model computed values that are not finite")


def grammar_problem(message: str) -> RowProblem:
    return RowProblem(BAD_REQUEST, message, INVALID_GRAMMAR)


def settings_problem(error: Exception) -> RowProblem:
    return RowProblem(BAD_REQUEST, f"this request's sampling settings can't be followed: {error}")
