"""The one error of this package."""

from __future__ import annotations


class WeightsError(ValueError):
    """Weights can't be used; the message names the file or tensor, what was expected and what was found."""
