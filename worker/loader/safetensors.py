"""Checkpoints in the safetensors format: one file, or many under an index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.safetensors_header import read_safetensors_header
from fastengine.worker.loader.checkpoint import ALL_ROWS, Checkpoint, StoredTensor
from fastengine.worker.loader.errors import WeightsError
from fastengine.worker.loader.mapped_file import MappedFile, Moved

# Names of element types -> how numpy holds them. bfloat16 is widened by a shift.
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}


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

    def __init__(self, files: list[Path], moved: Moved | None = None):
        self.source = str(files[0] if len(files) == 1 else files[0].parent)
        self._tensors: dict[str, _Tensor] = {}
        self._files = [MappedFile(path, moved) for path in files]
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
        raw = tensor.file.paged_in(tensor.file.view(tensor.offset, tensor.nbytes).view(DTYPES[tensor.dtype]).reshape(tensor.shape)[rows])
        if tensor.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def stored(self, name: str) -> StoredTensor | None:
        tensor = self._tensors[name]
        return StoredTensor(tensor.file.paged_in(tensor.file.view(tensor.offset, tensor.nbytes)), tensor.dtype)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _read_header(file: MappedFile) -> dict[str, _Tensor]:
    try:
        places = read_safetensors_header(file.path)
    except ModelFileError as error:
        raise WeightsError(str(error)) from None
    return {name: _Tensor(file, place.dtype, place.shape, place.offset, place.nbytes) for name, place in places.items()}
