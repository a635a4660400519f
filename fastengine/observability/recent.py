"""Recent: the things of the last minutes, for a report that is written when something has gone wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_S = 300.0
# Tokens take 4 bytes and more, twice for a prompt.
MAX_KEPT_TOKENS = 16 << 20


class Recent(Generic[T]):
    """Bounded by age and by the tokens of what is kept, the oldest going first. Times are ``time.monotonic()``."""

    def __init__(self, *, kept_s: float = KEPT_S, max_tokens: int = MAX_KEPT_TOKENS):
        self._kept_s = kept_s
        self._max_tokens = max_tokens
        self._kept: deque[tuple[float, int, T]] = deque()
        self._num_tokens = 0

    def add(self, item: T, num_tokens: int, now: float) -> None:
        self._kept.append((now, num_tokens, item))
        self._num_tokens += num_tokens
        while self._kept and (self._num_tokens > self._max_tokens or self._kept[0][0] < now - self._kept_s):
            self._num_tokens -= self._kept.popleft()[1]

    def since(self, now: float) -> Iterator[T]:
        """What is still recent at ``now``, the oldest first."""
        for added_at, _, item in self._kept:
            if added_at >= now - self._kept_s:
                yield item
