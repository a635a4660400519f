"""The interface of a place where requests wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

Rank = tuple[int, int]


class Queued(Protocol):
    """What a scheduler needs to know of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""

    @property
    def priority(self) -> int:
        """Lower runs first."""

    @property
    def arrival_number(self) -> int:
        """Grows by one per request."""


RequestT = TypeVar("RequestT", bound=Queued)


class Scheduler(ABC, Generic[RequestT]):
    """An ordered store of requests that no engine has taken yet. Each request is in it at most once."""

    @abstractmethod
    def put(self, request: RequestT) -> None:
        """Let ``request`` wait. Raises ValueError when its id waits already."""

    @abstractmethod
    def take(self, max_requests: int, max_tokens: int) -> list[RequestT]:
        """Remove and return the next requests, best first.

        Ends before the prompt that would make the sum exceed ``max_tokens``, but the first request is
        returned however long it is: otherwise it would wait for ever.
        """

    @abstractmethod
    def remove(self, request_id: str) -> RequestT | None:
        """Remove the request of exactly this id; None when it doesn't wait here."""

    @abstractmethod
    def first_rank(self) -> Rank | None:
        """The rank of the request that :meth:`take` would return first; smaller is better."""

    @abstractmethod
    def rank(self, request: RequestT) -> Rank:
        """Where ``request`` stands in the order; smaller is better."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests waiting."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Prompt tokens waiting."""
