"""A whole step of a dense decoder as one compiled operator.

:class:`FusedModel` holds packed weights behind an opaque handle and runs embedding, norms, quantized
GEMMs, rotary embedding, paged attention, the gated MLP and the LM head over a ragged batch in one call.
A row's result is bit-identical whatever else is in the batch and however many threads compute it.
What a model consists of and how it is packed is said in :mod:`fastengine.custom_ops.fused_shape`.

The compiled core has a plain C interface, so numpy arrays and Paddle CPU tensors are both passed as
pointers, without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastengine.custom_ops.fused_sampling import RowSampling
from fastengine.custom_ops.fused_shape import MODEL_LEVEL, FusedShape, Layout, LinearShape, Packing, Source, SourceKind, layer_linears, layer_vectors

if TYPE_CHECKING:
    from fastengine.custom_ops.fused_slots import BoundSlots

__all__ = [
    "ARENA_ALIGNMENT",
    "MAX_HEADS_PER_KV",
    "MODEL_LEVEL",
    "FusedCache",
    "FusedError",
    "FusedModel",
    "FusedShape",
    "KvType",
    "Layout",
    "LinearShape",
    "Packing",
    "Source",
    "SourceKind",
    "has_instruction_set",
    "hash_rows",
    "layer_linears",
    "layer_vectors",
    "load_library",
]

ARENA_ALIGNMENT = 64
MAX_HEADS_PER_KV = 24


class KvType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, ctypes.c_int64) for name in ("rotary_dim", "max_position", "rope_interleaved", "tied")),
        *((name, ctypes.c_float) for name in ("rms_epsilon", "attention_scale")),
    ]


class _Part(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("order", ctypes.c_void_p), ("kind", ctypes.c_int32), ("rows", ctypes.c_int64)]


class _StepArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_samples", "max_blocks", "block_size", "kv_type")),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "sample_rows")
        ),
        *((name, ctypes.c_void_p) for name in ("key_caches", "value_caches", "key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("logits", "token_out", "hidden_out", "hidden_in", "sampling")),
    ]


@dataclass(frozen=True)
class FusedCache:
    """Addresses of the paged KV memory, one entry per layer.

    Keys and values hold ``num_blocks * kv_heads * block_size * head_dim`` elements of ``kv_type``,
    blocks first; what lies where inside a block is the operator's own (``cpu/fused/views.h``). INT8
    needs float32 ``[num_blocks, kv_heads, block_size]`` scales beside each.
    """

    kv_type: KvType
    block_size: int
    keys: ctypes.Array[ctypes.c_void_p]
    values: ctypes.Array[ctypes.c_void_p]
    key_scales: ctypes.Array[ctypes.c_void_p] | None = None
    value_scales: ctypes.Array[ctypes.c_void_p] | None = None

    @classmethod
    def of(
        cls,
        kv_type: KvType,
        block_size: int,
        keys: Sequence[int],
        values: Sequence[int],
        key_scales: Sequence[int] = (),
        value_scales: Sequence[int] = (),
    ) -> FusedCache:
        """From data addresses (``array.ctypes.data``, ``tensor.data_ptr()``); the caller keeps the memory alive."""
        if block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, got {block_size}")
        if (kv_type == KvType.INT8) != bool(key_scales) or bool(key_scales) != bool(value_scales):
            raise ValueError("an int8 cache needs scales, and no other has them")
        pointers = [(ctypes.c_void_p * len(part))(*part) if part else None for part in (keys, values, key_scales, value_scales)]
        return cls(kv_type, block_size, *pointers)


class FusedError(RuntimeError):
    """The compiled operator refused its arguments."""


def load_library(path: str | Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.fe_fused_error.restype = ctypes.c_char_p
    library.fe_fused_has_isa.argtypes = [ctypes.c_char_p]
    library.fe_fused_isa.argtypes = [ctypes.c_int64]
    library.fe_fused_isa.restype = ctypes.c_char_p
    library.fe_fused_destroy.argtypes = [ctypes.c_int64]
    library.fe_fused_destroy.restype = None
    library.fe_fused_num_bytes.argtypes = [ctypes.c_int64]
    library.fe_fused_num_bytes.restype = ctypes.c_int64
    library.fe_fused_bytes_read.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.fe_fused_bytes_read.restype = ctypes.c_int64
    library.fe_fused_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.fe_fused_bind.restype = None
    library.fe_fused_trim.argtypes = [ctypes.c_int64]
    library.fe_fused_trim.restype = None
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.fe_fused_create.argtypes = [pointer, text, pointer]
    library.fe_fused_set_rotary.argtypes = [integer, pointer, integer]
    library.fe_fused_define_vector.argtypes = [integer, integer, text, integer]
    library.fe_fused_define_linear.argtypes = [integer, integer, text, integer, integer, integer, integer, integer]
    library.fe_fused_set_vector.argtypes = [integer, integer, text, pointer, integer]
    library.fe_fused_set_rows.argtypes = [integer, integer, text, integer, pointer, integer]
    library.fe_fused_set_bias.argtypes = [integer, integer, text, integer, pointer, integer]
    library.fe_fused_unpack_row.argtypes = [integer, integer, text, integer, pointer]
    library.fe_fused_hash_rows.argtypes = [pointer, integer, pointer, pointer, integer, pointer]
    library.fe_fused_step.argtypes = [integer, pointer, integer]
    library.fe_fused_sample.argtypes = [integer, pointer, integer]
    library.fe_fused_decode.argtypes = [integer, pointer, ctypes.c_char_p, integer, integer, integer, pointer, integer, pointer, pointer]
    return library


def has_instruction_set(library: ctypes.CDLL, name: str) -> bool:
    """Whether this library has a fused step of that instruction set, and this processor can run it."""
    return bool(library.fe_fused_has_isa(name.encode()))


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        raise FusedError(library.fe_fused_error().decode())


def _part(source: Source) -> tuple[_Part, tuple[np.ndarray | None, ...]]:
    """The C form of ``source``, and what must live as long."""
    data = np.ascontiguousarray(source.data)
    order = None if source.order is None else np.ascontiguousarray(source.order, dtype=np.int32)
    return _Part(_address(data), _address(order), source.kind, source.rows), (data, order)


def hash_rows(library: ctypes.CDLL, source: Source, k: int, row_keys: np.ndarray, column_keys: np.ndarray, num_threads: int) -> int:
    """Sum of ``bits[r, c] * row_keys[r] * column_keys[c]`` modulo 2**64 over the float32 values of ``source``.

    ``row_keys`` uint64 ``[rows]``, ``column_keys`` uint64 ``[k]``. Raises FusedError.
    """
    part, keep = _part(source)
    found = ctypes.c_uint64()
    row_keys, column_keys = np.ascontiguousarray(row_keys), np.ascontiguousarray(column_keys)
    _check(library, library.fe_fused_hash_rows(ctypes.byref(part), k, _address(row_keys), _address(column_keys), num_threads, ctypes.byref(found)))
    del keep
    return found.value


class FusedModel:
    """A decoder's packed weights and its step.

    The weights lie in one arena of ``num_bytes`` that the caller owns and hands over with :meth:`bind`.
    Linears are those of :func:`layer_linears`, and ``embedding`` and ``lm_head`` (not when tied) at
    ``MODEL_LEVEL``; vectors those of :func:`layer_vectors`, and ``final_norm``. ``isa``: ``avx512``, ``avxvnni`` or ``avx2``
    (:class:`FusedError` if this processor or library lacks it); ``best``: the best that :meth:`Library.use_isa` has left.
    The packed bytes are the same for all.
    """

    def __init__(self, library: ctypes.CDLL, shape: FusedShape, packing: Packing, num_threads: int, *, isa: str = "best"):
        if shape.head_dim % 16:
            raise ValueError(f"head_dim must be a multiple of 16, got {shape.head_dim}")
        if shape.num_heads // shape.num_kv_heads > MAX_HEADS_PER_KV:
            raise ValueError(f"more than {MAX_HEADS_PER_KV} query heads share a KV head")
        self._library = library
        self.shape = shape
        self.packing = packing
        self.num_threads = num_threads
        self._arena: np.ndarray | None = None
        scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
        raw = _Shape(
            shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate, shape.vocab,
            shape.cos_sin.shape[1], shape.cos_sin.shape[0], shape.rope_interleaved, shape.tied, shape.rms_epsilon, scale,
        )  # fmt: skip
        handle = ctypes.c_int64()
        _check(library, library.fe_fused_create(ctypes.byref(raw), isa.encode(), ctypes.byref(handle)))
        self._handle = handle.value
        cos_sin = np.ascontiguousarray(shape.cos_sin, dtype=np.float32)
        _check(library, library.fe_fused_set_rotary(self._handle, cos_sin.ctypes.data, cos_sin.size))
        self._define()

    def _define(self) -> None:
        shape, packing = self.shape, self.packing
        table = LinearShape(shape.vocab, shape.hidden)
        self._define_linear(MODEL_LEVEL, "embedding", table, packing.table_layout)
        for layer in range(shape.num_layers):
            for name, size in layer_vectors(shape).items():
                self._define_vector(layer, name, size)
            for name, linear in layer_linears(shape).items():
                self._define_linear(layer, name, linear, packing.layout)
        self._define_vector(MODEL_LEVEL, "final_norm", shape.hidden)
        if not shape.tied:
            self._define_linear(MODEL_LEVEL, "lm_head", table, packing.table_layout)
        if packing.has_screen:
            self._define_linear(MODEL_LEVEL, "screen", table, Layout.INT4)

    def _define_vector(self, layer: int, name: str, size: int) -> None:
        _check(self._library, self._library.fe_fused_define_vector(self._handle, layer, name.encode(), size))

    def _define_linear(self, layer: int, name: str, linear: LinearShape, layout: Layout) -> None:
        numbers = (linear.rows, linear.k, layout, linear.paired, linear.has_bias)
        _check(self._library, self._library.fe_fused_define_linear(self._handle, layer, name.encode(), *numbers))

    def close(self) -> None:
        """Free what the operator holds; no method may be called afterwards."""
        if self._handle:
            self._library.fe_fused_destroy(self._handle)
            self._handle = 0
            self._arena = None

    @property
    def instruction_set(self) -> str:
        """``avx512`` (with VNNI), ``avxvnni`` or ``avx2``."""
        return str(self._library.fe_fused_isa(self._handle).decode())

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return int(self._library.fe_fused_num_bytes(self._handle))

    def bytes_read(self, num_greedy: int) -> int:
        """Of the arena, what a step reads in which ``num_greedy`` rows take their largest logit and no others have any.

        Rows of an embedding that is not the head, and the strips of a screened head that may win, are left out.
        """
        return int(self._library.fe_fused_bytes_read(self._handle, num_greedy))

    def bind(self, arena: np.ndarray | None) -> None:
        """Use ``arena`` from now on: uint8 ``[num_bytes]``, zeroed or with what it held before. None: let go of it."""
        if arena is not None and (arena.nbytes < self.num_bytes or arena.ctypes.data % ARENA_ALIGNMENT):
            raise ValueError(f"the arena needs {self.num_bytes} bytes aligned to {ARENA_ALIGNMENT}")
        self._library.fe_fused_bind(self._handle, _address(arena))
        self._arena = arena
        if arena is None:
            self._library.fe_fused_trim(self._handle)

    def set_vector(self, name: str, values: np.ndarray, layer: int = MODEL_LEVEL) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        self._require_arena()
        _check(self._library, self._library.fe_fused_set_vector(self._handle, layer, name.encode(), values.ctypes.data, values.size))

    def set_rows(self, name: str, source: Source, layer: int = MODEL_LEVEL, *, first_row: int = 0) -> None:
        """Pack ``source`` as rows ``first_row`` and on of a linear, in place. Raises FusedError."""
        part, keep = _part(source)
        self._require_arena()
        _check(self._library, self._library.fe_fused_set_rows(self._handle, layer, name.encode(), first_row, ctypes.byref(part), self.num_threads))
        del keep

    def set_bias(self, name: str, values: np.ndarray, layer: int, *, first_row: int = 0) -> None:
        """Float32 ``values`` as biases of rows ``first_row`` and on."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        self._require_arena()
        _check(self._library, self._library.fe_fused_set_bias(self._handle, layer, name.encode(), first_row, values.ctypes.data, values.size))

    def unpacked_row(self, name: str, row: int, k: int, layer: int = MODEL_LEVEL) -> np.ndarray:
        """One packed row as the kernels see it, float32 ``[k]``: for checking."""
        out = np.empty(k, np.float32)
        self._require_arena()
        _check(self._library, self._library.fe_fused_unpack_row(self._handle, layer, name.encode(), row, out.ctypes.data))
        return out

    def _require_arena(self) -> None:
        if self._arena is None:
            raise FusedError("the model's memory is not bound")

    def step(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        slot_mapping: np.ndarray,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        sample_rows: np.ndarray,
        cache: FusedCache,
        *,
        logits: np.ndarray | None = None,
        token_out: np.ndarray | None = None,
        hidden_out: np.ndarray | None = None,
        sampling: RowSampling | None = None,
    ) -> None:
        """Compute T tokens of S sequences and write their keys and values.

        All indices are C-contiguous int32: ``token_ids, positions, slot_mapping [T]``, ``query_starts
        [S + 1]``, ``context_lens [S]``, ``block_tables [S, M]``. ``sample_rows [R]`` are the tokens
        whose logits are wanted, into ``logits`` float32 ``[R, vocab]`` and/or their argmax into
        ``token_out`` int32 ``[R]`` (the lowest id of equals, -1 where no logit is a number); ``hidden_out`` float32 ``[R, hidden]``
        takes the states before the LM head. Without ``logits`` and ``token_out`` the head is left out. With
        ``sampling`` the tokens are drawn as it says; that needs both, and may change ``logits``.

        No index is checked here or below: a wrong one reads or writes foreign memory.
        """
        arrays = (token_ids, positions, slot_mapping, query_starts, context_lens, block_tables, sample_rows)
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays), "step takes contiguous int32 arrays"

        args = _StepArgs(
            token_ids.size, context_lens.size, sample_rows.size, block_tables.shape[1], cache.block_size, cache.kv_type,
            *(a.ctypes.data for a in arrays),
            *(None if p is None else ctypes.addressof(p) for p in (cache.keys, cache.values, cache.key_scales, cache.value_scales)),
            _address(logits), _address(token_out), _address(hidden_out), None, None if sampling is None else sampling.address,
        )  # fmt: skip
        _check(self._library, self._library.fe_fused_step(self._handle, ctypes.byref(args), self.num_threads))

    def decode(self, slots: bytes, num_steps: int, bound: BoundSlots, first_step: int, last_cut: int) -> tuple[int, bytes]:
        """Up to ``num_steps`` steps of ``slots`` (int32 ``[n]``): how many, k, and their tokens, int32 ``[k, n]``, appended to the slots' rows.

        Steps are numbered from ``first_step``; none up to the number at the address ``last_cut`` (int64, which may change meanwhile) is begun.

        With k below ``num_steps`` something about the next step is not plain (a slot with penalties, say, or logits that are no
        numbers), and it has changed nothing but KV memory: :meth:`step` computes the same again for a caller who looks at every row.
        """
        assert num_steps <= bound.max_steps, f"{num_steps} steps of at most {bound.max_steps}"
        row_bytes = len(slots)
        steps = (row_bytes // 4, num_steps, first_step, last_cut)
        code = self._library.fe_fused_decode(self._handle, bound.address, slots, *steps, self.num_threads, bound.token_address, bound.done_address)
        _check(self._library, code)
        return bound.done.value, ctypes.string_at(bound.token_address, bound.done.value * row_bytes)

    def logits(self, hidden: np.ndarray, out: np.ndarray) -> None:
        """Logits of a step's ``hidden_out`` float32 ``[R, hidden]`` into ``out`` float32 ``[R, vocab]``."""
        assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in (hidden, out)), "logits takes contiguous float32 arrays"
        args = _StepArgs(num_samples=len(hidden), logits=_address(out), hidden_in=_address(hidden))
        _check(self._library, self._library.fe_fused_step(self._handle, ctypes.byref(args), self.num_threads))

    def sample(self, logits: np.ndarray, sampling: RowSampling, token_out: np.ndarray) -> None:
        """Draw from ``logits`` float32 ``[R, vocab]``, which it may change, into ``token_out`` int32 ``[R]``."""
        assert logits.dtype == np.float32, "sample takes float32 logits"
        assert logits.flags.c_contiguous, "sample takes contiguous logits"
        args = _StepArgs(num_samples=len(logits), logits=_address(logits), token_out=_address(token_out), sampling=sampling.address)
        _check(self._library, self._library.fe_fused_sample(self._handle, ctypes.byref(args), self.num_threads))
