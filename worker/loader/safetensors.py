"""Checkpoints in the safetensors format: one file, or many under an index.

Layout of a file: ``u64 header length | JSON header | tensor data``; the header maps a name to its
dtype, shape and byte range in the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fastengine.worker.loader.checkpoint import ALL_ROWS, Checkpoint
from fastengine.worker.loader.errors import WeightsError
from fastengine.worker.loader.mapped_file import MappedFile

MAX_HEADER_BYTES = 100 << 20
# Names of element types -> how numpy holds them. bfloat16 is widened by a shift.
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Tensor:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsCheckpoint(Checkpoint):
    """Opens and checks the headers of all files; data is read when asked for.

    Raises WeightsError naming the file for a damaged or truncated one, or a tensor that stands in two.
    """

    def __init__(self, files: list[Path]):
        self.source = str(files[0] if len(files) == 1 else files[0].parent)
        self._tensors: dict[str, _Tensor] = {}
        self._files = [MappedFile(path) for path in files]
        for file in self._files:
            for name, tensor in _read_header(file).items():
                if name in self._tensors:
                    raise WeightsError(f"{file.path}: tensor {name} stands in {self._tensors[name].file.path.name}, too")
                self._tensors[name] = tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def unreadable(self) -> list[str]:
        return [f"{name} has element type {tensor.dtype}" for name, tensor in self._tensors.items() if tensor.dtype not in DTYPES]

    def read(self, name: str, rows: slice = ALL_ROWS) -> np.ndarray:
        tensor = self._tensors[name]
        raw = tensor.file.view(tensor.offset, tensor.nbytes).view(DTYPES[tensor.dtype]).reshape(tensor.shape)[rows]
        if tensor.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _read_header(file: MappedFile) -> dict[str, _Tensor]:
    if file.size < 8:
        raise WeightsError(f"{file.path}: is {file.size} bytes long: too short for a safetensors file")
    length = int.from_bytes(file.view(0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES or 8 + length > file.size:
        raise WeightsError(f"{file.path}: claims a header of {length} bytes in a file of {file.size}: not a safetensors file, or truncated")
    try:
        entries = msgspec.json.decode(file.view(8, length).tobytes(), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except msgspec.MsgspecError as error:
        raise WeightsError(f"{file.path}: the header is no safetensors header: {error}") from None
    return {name: _checked(file, name, entry, data_start=8 + length) for name, entry in decoded.items()}


def _checked(file: MappedFile, name: str, entry: _Entry, data_start: int) -> _Tensor:
    start, end = entry.data_offsets
    if not 0 <= start <= end or data_start + end > file.size:
        raise WeightsError(f"{file.path}: tensor {name} ends at byte {data_start + end}, the file at {file.size}: truncated or damaged")
    shape = tuple(entry.shape)
    dtype = DTYPES.get(entry.dtype)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise WeightsError(f"{file.path}: tensor {name} of shape {list(shape)} and type {entry.dtype} can't be {end - start} bytes long")
    return _Tensor(file, entry.dtype, shape, data_start + start, end - start)
