"""A model's weights as a whole: checked against a checkpoint, filled from it, hashed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fastengine.model_files.load import load_spec, resolve_model, weight_files
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.layers.weights import ALL, WeightPiece
from fastengine.worker.loader.checkpoint import Checkpoint
from fastengine.worker.loader.errors import WeightsError
from fastengine.worker.loader.gguf import GGUFCheckpoint, with_hugging_face_rows
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.loader.safetensors import SafetensorsCheckpoint
from fastengine.worker.memory import Storage, to_bits

# Checkpoint tensors that models compute themselves.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
MAX_NAMED = 5
MASK64 = (1 << 64) - 1
Progress = Callable[[float], None]


def model_spec(path: str) -> ModelSpec:
    """The model's shape with rows as the loaders deliver them. Raises ModelFileError."""
    spec = load_spec(path)
    return with_hugging_face_rows(spec) if resolve_model(path).is_file() else spec


def open_checkpoint(path: str, file_format: str = "auto", moved: Moved | None = None) -> Checkpoint:
    """Open a model directory or GGUF file; ``file_format`` auto, safetensors or gguf. ``moved`` is told of every stretch that was read.

    Raises ModelFileError or WeightsError naming the file.
    """
    found = "gguf" if resolve_model(path).is_file() else "safetensors"
    if file_format not in ("auto", found):
        raise WeightsError(f"{path} holds {found} weights, but format {file_format} was asked for")
    files = weight_files(path)
    return GGUFCheckpoint(files, load_spec(path), moved) if found == "gguf" else SafetensorsCheckpoint(files, moved)


class ModelWeights:
    """The pieces of a model on this rank, and the loops over them."""

    def __init__(self, pieces: Iterable[WeightPiece], tied_lm_head: bool, num_threads: int):
        self.pieces = list(pieces)
        self._num_threads = num_threads
        self._may_be_left_over = {"lm_head.weight"} if tied_lm_head else set()

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors this model is made of."""
        return {piece.name: piece.shape for piece in self.pieces}

    def storages(self) -> list[Storage]:
        """Every piece of memory once, in a fixed order."""
        return list({id(piece.storage): piece.storage for piece in self.pieces}.values())

    def allocate(self) -> None:
        for storage in self.storages():
            storage.allocate()

    def drop(self) -> None:
        for storage in self.storages():
            storage.drop()

    def check(self, checkpoint: Checkpoint, *, partial: bool = False) -> None:
        """Compare names and shapes without reading data; ``partial`` allows tensors to be absent.

        Raises WeightsError naming the tensors, what was expected and what was found.
        """
        check_tensors(self.expected_shapes(), checkpoint, self._may_be_left_over, partial=partial)

    def fill(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        """Copy ``checkpoint`` (checked before) into the storages, in place, tensor by tensor."""
        names = checkpoint.shapes()
        pieces = [piece for piece in self.pieces if piece.name in names]
        total = sum(math.prod(piece.shape) for piece in pieces) or 1
        done = 0

        def fill_one(piece: WeightPiece) -> WeightPiece:
            piece.store(checkpoint.read(piece.name, piece.rows))
            return piece

        with ThreadPoolExecutor(self._num_threads) as pool:
            for piece in pool.map(fill_one, pieces):
                done += math.prod(piece.shape)
                if progress is not None:
                    progress(done / total)

    def checksum(self, moved: Moved | None = None) -> int:
        """This rank's share of the hash of what is loaded: add the ranks' up, modulo 2**64.

        The sum does not depend on how many ranks there are or which file format the weights came in.
        It finds corruption and mix-ups; it is no defence against somebody who forges weights.
        """
        return self._hash(lambda piece: piece.bits(), moved)

    def checksum_of(self, checkpoint: Checkpoint) -> int:
        """What :meth:`checksum` would be after :meth:`fill`, without touching what is loaded."""

        def candidate(piece: WeightPiece) -> np.ndarray:
            values = checkpoint.read(piece.name, piece.rows)
            bits = to_bits(values[:, piece.columns] if values.ndim == 2 else values, piece.storage.dtype)
            return bits.view(np.uint32 if bits.dtype.itemsize == 4 else np.uint16)

        return self._hash(candidate)

    def _hash(self, bits_of: Callable[[WeightPiece], np.ndarray], moved: Moved | None = None) -> int:
        counted = [piece for piece in self.pieces if piece.counted]
        total = 0
        with ThreadPoolExecutor(self._num_threads) as pool:
            for piece_hash in pool.map(lambda piece: _piece_hash(piece, bits_of(piece)), counted):
                total += piece_hash
                if moved is not None:
                    moved()
        return total & MASK64


def check_tensors(expected: dict[str, tuple[int, ...]], checkpoint: Checkpoint, may_be_left_over: Collection[str], *, partial: bool) -> None:
    """Compare names and shapes without reading data; ``partial`` allows tensors to be absent. Raises WeightsError."""
    found = checkpoint.shapes()
    missing = [] if partial else [name for name in expected if name not in found]
    extra = [n for n in found if n not in expected and n not in may_be_left_over and not n.endswith(IGNORED_SUFFIXES)]
    wrong = [
        f"{name} has shape {list(found[name])}, the model needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    unreadable = checkpoint.unreadable()
    problems = [
        *([f"element types that can't be read: {_some(unreadable, '; ')}"] if unreadable else []),
        *([f"missing tensors: {_some(missing)}"] if missing else []),
        *([f"tensors the model does not have: {_some(extra)}"] if extra else []),
        *([f"wrong shapes: {_some(wrong, '; ')}"] if wrong else []),
    ]
    if problems:
        raise WeightsError(f"{checkpoint.source}: {'; '.join(problems)}")


def _piece_hash(piece: WeightPiece, bits: np.ndarray) -> int:
    return hash_of_bits(piece.name, piece.shape, bits, piece.rows, piece.columns)


def hash_of_bits(name: str, shape: tuple[int, ...], bits: np.ndarray, rows: slice = ALL, columns: slice = ALL) -> int:
    """Sum over elements of ``bits[r, c] * row_key[r] * column_key[c]`` modulo 2**64.

    ``bits`` are the ``rows`` and ``columns`` of tensor ``name``. The keys are odd and belong to the
    whole tensor's rows and columns, so parts of a tensor that stand on different ranks add up to the
    hash of the whole, and any single changed bit changes it.
    """
    matrix = bits if bits.ndim == 2 else bits[:, None]
    row_keys, column_keys = hash_keys(name, shape)
    row_keys, column_keys = row_keys[rows], column_keys[columns]
    total = 0
    rows_at_once = max(1, (1 << 20) // column_keys.size)
    with np.errstate(over="ignore"):
        for start in range(0, len(matrix), rows_at_once):
            part = matrix[start : start + rows_at_once].astype(np.uint64) @ column_keys
            total += int((part * row_keys[start : start + rows_at_once]).sum(dtype=np.uint64))
    return total & MASK64


def hash_keys(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a tensor's rows and columns, uint64; a vector is a matrix of one column."""
    num_rows, num_columns = (*shape, 1)[:2]
    seed = zlib.crc32(name.encode())
    return _odd_keys(num_rows, seed), _odd_keys(num_columns, seed + 1)


def _odd_keys(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64) | np.uint64(1)


def _some(items: list[str], separator: str = ", ") -> str:
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return separator.join(items[:MAX_NAMED]) + more
