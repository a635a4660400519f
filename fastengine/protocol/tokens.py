"""Token ids on the wire: little-endian int32 bytes, decoded without building Python integers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

TOKEN_DTYPE = np.dtype("<i4")
HANDLE_DTYPE = np.dtype("<i8")


def pack_token_ids(token_ids: Iterable[int] | np.ndarray) -> bytes:
    """Token ids as little-endian int32 bytes."""
    if isinstance(token_ids, list) and sys.byteorder == "little":
        return array("i", token_ids).tobytes()  # several times faster than numpy for the short columns of a plan
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids, dtype=TOKEN_DTYPE).tobytes()
    return np.fromiter(token_ids, dtype=TOKEN_DTYPE).tobytes()


def unpack_token_ids(packed: bytes) -> np.ndarray:
    """A read-only ``int32[n]`` view of :func:`pack_token_ids`'s bytes."""
    return np.frombuffer(packed, dtype=TOKEN_DTYPE)


def unpack_columns(handles: bytes, token_ids: bytes, num_steps: int) -> Iterator[tuple[int, list[int]]]:
    """Each of the sequences ``handles`` (int64[n]) with its own of ``token_ids`` (int32[num_steps, n]), in order. Raises ValueError."""
    # Without numpy: an API process needs it for nothing else between two steps, and finds none of it in the cache.
    owners, tokens = array("q", handles), array("i", token_ids)
    if sys.byteorder != "little":
        owners.byteswap()
        tokens.byteswap()
    num_rows = len(owners)
    if len(tokens) != num_rows * num_steps:
        raise ValueError(f"{len(tokens)} token ids of {num_rows} sequences in {num_steps} steps")
    if num_steps == 1 or not num_rows:
        return zip(owners, [[token] for token in tokens], strict=True)
    steps = [tokens[first : first + num_rows] for first in range(0, len(tokens), num_rows)]
    return zip(owners, map(list, zip(*steps, strict=True)), strict=True)
