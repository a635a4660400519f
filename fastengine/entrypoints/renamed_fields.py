"""Errors about a field under the name its sender knows it by."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from fastengine.frontend.errors import ApiError

_ROOT = re.compile(r"\w+")


@contextlib.contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """While inside, an ApiError about field ``a.b[0]`` speaks of ``rename("a.b[0]")`` instead."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        param, message = rename(error.param), error.message
        if message.startswith(error.param):
            message = param + message[len(error.param) :]
        raise ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s) from None


def by_root(names: Mapping[str, str]) -> Callable[[str], str]:
    """A renaming of ``a.b[0]`` to ``names["a"] + ".b[0]"``; what is not in ``names`` keeps its name."""

    def rename(param: str) -> str:
        root = _ROOT.match(param)
        return param if root is None else names.get(root.group(), root.group()) + param[root.end() :]

    return rename
