"""Supervisor -> engine and API processes: are you there?

The two receive different unions of messages, objects here and arrays there, which can't be mixed.
"""

from __future__ import annotations

import msgspec


class EngineCheck(msgspec.Struct, frozen=True, tag="life_check"):
    """Show ``number`` among the instance's life signs, when its turn has come among all other messages."""

    number: int


class ClientCheck(msgspec.Struct, frozen=True, tag="life_check", array_like=True):
    """The same for an API process."""

    number: int
