"""The one error of this package."""

from __future__ import annotations

from pathlib import Path


class ModelFileError(ValueError):
    """A model's files can't be used; the message names the file, what is wrong and what to do."""

    def __init__(self, path: str | Path, message: str):
        super().__init__(f"{path}: {message}")
        self.path = str(path)
