"""Token ids on the wire: little-endian int32 bytes, decoded without building Python integers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

TOKEN_DTYPE = np.dtype("<i4")


def pack_token_ids(token_ids: Iterable[int] | np.ndarray) -> bytes:
    """Token ids as little-endian int32 bytes."""
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids, dtype=TOKEN_DTYPE).tobytes()
    return np.fromiter(token_ids, dtype=TOKEN_DTYPE).tobytes()


def unpack_token_ids(packed: bytes) -> np.ndarray:
    """A read-only ``int32[n]`` view of :func:`pack_token_ids`'s bytes."""
    return np.frombuffer(packed, dtype=TOKEN_DTYPE)
