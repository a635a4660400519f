"""Reader of a GGUF file's header (versions 2 and 3): metadata and where each tensor's bytes are.

Layout of a file, all little-endian::

    magic "GGUF" | u32 version | u64 num_tensors | u64 num_pairs
    num_pairs   x  string key, u32 type, value
    num_tensors x  string name, u32 num_dims, u64 dims[num_dims] (innermost first), u32 type, u64 offset
    padding to general.alignment | tensor data (offsets count from here)

Every length in the file is checked against the bytes that are left before anything is read or
allocated, so a truncated or hostile file ends in a ModelFileError that names the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from fastengine.model_files.errors import ModelFileError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 4096
MAX_ARRAY_DEPTH = 4

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

# Value types of metadata.
TYPE_STRING, TYPE_ARRAY, TYPE_BOOL = 8, 9, 7
SCALAR_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# Tensor type id -> (name, elements per block, bytes per block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GGUFTensorInfo:
    """``shape`` is in numpy order (outermost first); ``offset`` is absolute in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings, decoded when first looked into: a vocabulary costs nothing to who needs none."""

    def __init__(self, raw: bytes, count: int):
        self._raw = raw  # count x (u64 length, UTF-8 bytes), lengths already checked
        self._count = count
        self._items: list[str] | None = None

    def byte_strings(self) -> list[bytes]:
        """The strings undecoded."""
        raw, read, position, out = self._raw, U64.unpack_from, 0, []
        for _ in range(self._count):
            start = position + 8
            position = start + read(raw, position)[0]
            out.append(raw[start:position])
        return out

    def to_list(self) -> list[str]:
        """All strings; bytes that are no UTF-8 become U+FFFD."""
        if self._items is None:
            self._items = [item.decode("utf-8", "replace") for item in self.byte_strings()]
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class GGUFHeader:
    """``metadata`` values are str, int, float, bool, numpy arrays (numbers), StringArray or lists of arrays."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is a file that begins with GGUF's magic."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except (IsADirectoryError, FileNotFoundError, PermissionError):
        return False


def read_gguf(path: str | Path) -> GGUFHeader:
    """Read the header; tensor data is only checked to lie within the file. Raises ModelFileError."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFileError(path, f"is {size} bytes long: too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data, size).read()
    except OSError as error:
        raise ModelFileError(path, f"can't be read: {error.strerror or error}") from error


class _HeaderReader:
    """A cursor over the file's bytes. ``_position`` never passes ``_size``."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self._path = path
        self._data = data
        self._size = size
        self._position = 0

    def read(self) -> GGUFHeader:
        if self._take(4, "the magic") != MAGIC:
            raise self._error("does not begin with GGUF's magic: not a GGUF file")
        version = self._u32("the version")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version and version & 0xFFFF == 0 else ""
            raise self._error(f"has GGUF version {version}{hint}; versions 2 and 3, little-endian, can be read")
        num_tensors = self._count("tensors", min_bytes=8 + 4 + 4 + 8)
        num_pairs = self._count("metadata pairs", min_bytes=8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(self._u32(f"the type of {key}"), key, depth=0)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        return GGUFHeader(self._path, version, metadata, self._place(entries, metadata))

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]) -> dict[str, GGUFTensorInfo]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._error(f"has an unusable general.alignment: {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._error(f"has the tensor {name!r} twice")
            if type_id not in TENSOR_TYPES:
                raise self._error(f"tensor {name!r} has the unknown type {type_id}: the file is newer than this reader")
            type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
            if shape[-1] % block_elements:
                raise self._error(f"tensor {name!r}: rows of {shape[-1]} elements are no multiple of {type_name}'s block of {block_elements}")
            nbytes = math.prod(shape) // block_elements * block_bytes
            if data_start + offset + nbytes > self._size:
                raise self._error(
                    f"is truncated: tensor {name!r} ends at byte {data_start + offset + nbytes}, the file at {self._size}; fetch it again"
                )
            tensors[name] = GGUFTensorInfo(name, shape, type_name, data_start + offset, nbytes)
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor's name")
        num_dims = self._u32(f"the dimensions of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self._u64(f"the shape of {name}") for _ in range(num_dims)]
        if 0 in dims:
            raise self._error(f"tensor {name!r} has an empty dimension: {dims}")
        return name, tuple(reversed(dims)), self._u32(f"the type of {name}"), self._u64(f"the offset of {name}")

    def _value(self, type_id: int, key: str, depth: int) -> Any:
        if type_id == TYPE_STRING:
            return self._take(self._u64(key), key).decode("utf-8", "replace")
        if type_id == TYPE_ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self._error(f"{key}: arrays are nested more than {MAX_ARRAY_DEPTH} deep")
            return self._array(key, depth)
        dtype = self._dtype(type_id, key)
        return np.frombuffer(self._take(dtype.itemsize, key), dtype)[0].item()

    def _array(self, key: str, depth: int) -> Any:
        type_id = self._u32(key)
        count = self._u64(key)
        if type_id == TYPE_STRING:
            return self._string_array(key, count)
        if type_id == TYPE_ARRAY:
            self._check(count * 12, key)
            return [self._value(TYPE_ARRAY, key, depth + 1) for _ in range(count)]
        dtype = self._dtype(type_id, key)
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)

    def _string_array(self, key: str, count: int) -> StringArray:
        self._check(count * 8, key)
        data, read, last = self._data, U64.unpack_from, self._size - 8
        start = position = self._position
        for _ in range(count):
            if position > last:
                raise self._truncated(key)
            position += 8 + read(data, position)[0]
        if position > self._size:
            raise self._truncated(key)
        return StringArray(self._take(position - start, key), count)

    def _dtype(self, type_id: int, key: str) -> np.dtype[Any]:
        if type_id not in SCALAR_DTYPES:
            raise self._error(f"{key}: value type {type_id} does not exist in GGUF")
        return SCALAR_DTYPES[type_id]

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if length > MAX_NAME_BYTES:
            raise self._error(f"{what} is {length} bytes long: the header is damaged at byte {self._position - 8}")
        return self._take(length, what).decode("utf-8", "replace")

    def _count(self, what: str, min_bytes: int) -> int:
        count = self._u64(f"the number of {what}")
        if count * min_bytes > self._size - self._position:
            raise self._error(f"claims {count} {what}, more than its {self._size} bytes can hold: the header is damaged")
        return count

    def _u32(self, what: str) -> int:
        return int(U32.unpack(self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(U64.unpack(self._take(8, what))[0])

    def _check(self, length: int, what: str) -> None:
        if length > self._size - self._position:
            raise self._truncated(what)

    def _take(self, length: int, what: str) -> bytes:
        self._check(length, what)
        start = self._position
        self._position = start + length
        return self._data[start : self._position]

    def _truncated(self, what: str) -> ModelFileError:
        return self._error(f"is truncated or damaged: {what} goes past the end of the file (byte {self._size}); fetch it again")

    def _error(self, message: str) -> ModelFileError:
        return ModelFileError(self._path, message)
