"""The header of a safetensors file: which tensors it has and where their bytes lie, all of it checked.

Layout of a file: ``u64 header length | JSON header | tensor data``; the header maps a name to its
dtype, shape and byte range in the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fastengine.model_files.errors import ModelFileError

MAX_HEADER_BYTES = 100 << 20
# Element types whose size is known here; others are left to who reads them.
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class TensorPlace:
    """``offset`` counts from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(path: Path) -> dict[str, TensorPlace]:
    """Name -> place of every tensor. Raises ModelFileError for a file that is damaged, truncated or of another format."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise ModelFileError(path, f"is {size} bytes long: too short for a safetensors file")
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ModelFileError(path, f"claims a header of {length} bytes in a file of {size}: not a safetensors file, or truncated")
            header = file.read(length)
    except OSError as error:
        raise ModelFileError(path, f"can't be read: {error.strerror or error}") from None
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(path, f"the header is no safetensors header: {error}") from None
    places = {name: _place(path, size, name, entry, data_start=8 + length) for name, entry in decoded.items()}
    _check_apart(path, places)
    return places


def _place(path: Path, size: int, name: str, entry: _Entry, data_start: int) -> TensorPlace:
    start, end = entry.data_offsets
    if not 0 <= start <= end or data_start + end > size:
        raise ModelFileError(path, f"tensor {name} ends at byte {data_start + end}, the file at {size}: truncated or damaged")
    element_bytes = ELEMENT_BYTES.get(entry.dtype)
    if any(n < 0 for n in entry.shape) or (element_bytes is not None and math.prod(entry.shape) * element_bytes != end - start):
        raise ModelFileError(path, f"tensor {name} of shape {entry.shape} and type {entry.dtype} can't be {end - start} bytes long")
    return TensorPlace(entry.dtype, tuple(entry.shape), data_start + start, end - start)


def _check_apart(path: Path, places: Mapping[str, TensorPlace]) -> None:
    last_end, last_name = 0, ""
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if place.offset < last_end:
            raise ModelFileError(path, f"tensors {last_name} and {name} overlap: the file is damaged")
        last_end, last_name = place.offset + place.nbytes, name
