"""A whole step of a dense decoder as one compiled operator.

:class:`FusedModel` holds packed weights behind an opaque handle and runs embedding, norms, quantized
GEMMs, rotary embedding, paged attention, the gated MLP and the LM head over a ragged batch in one call.
A row's result is bit-identical whatever else is in the batch and however many threads compute it.

The compiled core has a plain C interface, so numpy arrays and Paddle CPU tensors are both passed as
pointers, without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

MODEL_LEVEL = -1


class Layout(IntEnum):
    """How a linear's weights are packed."""

    FLOAT32 = 0
    INT8 = 1  # one scale per output column
    INT4 = 2  # four bits as the file has them, expanding exactly to INT8's form; 4-bit sources only


class SourceKind(IntEnum):
    """Formats that weights are packed from; the quantized ones are GGUF's."""

    FLOAT32 = 0
    FLOAT16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4


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
    _fields_ = [("data", ctypes.c_void_p), ("order", ctypes.c_void_p), ("kind", ctypes.c_int64), ("rows", ctypes.c_int64)]


class _StepArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_samples", "max_blocks", "block_size", "kv_type")),
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "sample_rows")
        ),
        *((name, ctypes.c_void_p) for name in ("key_caches", "value_caches", "key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("logits", "token_out", "hidden_out")),
    ]


@dataclass(frozen=True)
class FusedShape:
    """``cos_sin`` is float32 ``[max_position, rotary_dim]``, cosines in its first half and sines in its second."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_epsilon: float
    cos_sin: np.ndarray
    rope_interleaved: bool = False
    tied: bool = False
    attention_scale: float | None = None  # default: head_dim ** -0.5


@dataclass(frozen=True)
class Source:
    """Rows of one checkpoint tensor.

    ``data``: float32 or float16 ``[rows, k]``, or a GGUF tensor's raw bytes (any shape of uint8).
    ``order``: int32 ``[rows]``, the row of ``data`` that each packed row takes; None: as they lie.
    """

    data: np.ndarray
    kind: SourceKind
    rows: int
    order: np.ndarray | None = None


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
    library.fe_fused_uses_avx512.argtypes = [ctypes.c_int64]
    library.fe_fused_uses_avx512.restype = ctypes.c_int64
    library.fe_fused_destroy.argtypes = [ctypes.c_int64]
    library.fe_fused_destroy.restype = None
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.fe_fused_create.argtypes = [pointer, integer, pointer]
    library.fe_fused_set_vector.argtypes = [integer, integer, text, pointer, integer]
    library.fe_fused_set_linear.argtypes = [integer, integer, text, pointer, integer, integer, integer, integer, integer, pointer]
    library.fe_fused_unpack_row.argtypes = [integer, integer, text, integer, pointer]
    library.fe_fused_step.argtypes = [integer, pointer, integer]
    return library


class FusedModel:
    """A decoder's packed weights and its step.

    Linears are ``qkv`` (q, k and v one after the other), ``output``, ``gate_up`` (two sources), ``down``
    per layer, and ``embedding``, ``lm_head`` (not when tied). Vectors are ``input_norm``,
    ``post_attention_norm``, ``query_norm``, ``key_norm`` per layer, and ``final_norm``.
    """

    def __init__(self, library: ctypes.CDLL, shape: FusedShape, num_threads: int, *, isa: str = "best"):
        self._library = library
        self.shape = shape
        self.num_threads = num_threads
        if shape.head_dim % 16:
            raise ValueError(f"head_dim must be a multiple of 16, got {shape.head_dim}")
        if shape.num_heads // shape.num_kv_heads > 24:
            raise ValueError("more than 24 query heads share a KV head")
        scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
        raw = _Shape(
            shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate, shape.vocab,
            shape.cos_sin.shape[1], shape.cos_sin.shape[0], shape.rope_interleaved, shape.tied, shape.rms_epsilon, scale,
        )  # fmt: skip
        handle = ctypes.c_int64()
        self._check(library.fe_fused_create(ctypes.byref(raw), {"best": 0, "avx2": 2}[isa], ctypes.byref(handle)))
        self._handle = handle.value
        self.set_vector("cos_sin", shape.cos_sin)

    def close(self) -> None:
        """Free the weights; no method may be called afterwards."""
        if self._handle:
            self._library.fe_fused_destroy(self._handle)
            self._handle = 0

    @property
    def instruction_set(self) -> str:
        return "avx512" if self._library.fe_fused_uses_avx512(self._handle) else "avx2"

    def set_vector(self, name: str, values: np.ndarray, layer: int = MODEL_LEVEL) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        self._check(self._library.fe_fused_set_vector(self._handle, layer, name.encode(), values.ctypes.data, values.size))

    def set_linear(
        self,
        name: str,
        sources: Sequence[Source],
        k: int,
        layout: Layout,
        layer: int = MODEL_LEVEL,
        *,
        group: int = 32,
        bias: np.ndarray | None = None,
    ) -> None:
        """Pack ``sources`` (rows one after the other) of ``k`` inputs.

        ``group`` consecutive activations share one dynamic scale: a multiple of 32 that divides ``k``
        rounded up to a multiple of 64. ``bias`` is float32 ``[rows]``. Raises FusedError.
        """
        parts = (_Part * len(sources))()
        keep = []
        for part, source in zip(parts, sources, strict=True):
            data = np.ascontiguousarray(source.data)
            order = None if source.order is None else np.ascontiguousarray(source.order, dtype=np.int32)
            keep += [data, order]
            part.data, part.kind, part.rows = data.ctypes.data, source.kind, source.rows
            part.order = None if order is None else order.ctypes.data
        bias32 = None if bias is None else np.ascontiguousarray(bias, dtype=np.float32)
        self._check(
            self._library.fe_fused_set_linear(
                self._handle,
                layer,
                name.encode(),
                parts,
                len(sources),
                k,
                layout,
                group,
                name == "gate_up",
                None if bias32 is None else bias32.ctypes.data,
            )
        )

    def unpacked_row(self, name: str, row: int, k: int, layer: int = MODEL_LEVEL) -> np.ndarray:
        """One packed row as the kernels see it, float32 ``[k]``: for checking."""
        out = np.empty(k, np.float32)
        self._check(self._library.fe_fused_unpack_row(self._handle, layer, name.encode(), row, out.ctypes.data))
        return out

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
    ) -> None:
        """Compute T tokens of S sequences and write their keys and values.

        All indices are C-contiguous int32: ``token_ids, positions, slot_mapping [T]``, ``query_starts
        [S + 1]``, ``context_lens [S]``, ``block_tables [S, M]``. ``sample_rows [R]`` are the tokens
        whose logits are wanted, into ``logits`` float32 ``[R, vocab]`` and/or their argmax into
        ``token_out`` int32 ``[R]`` (the lowest id of equals); ``hidden_out`` float32 ``[R, hidden]``
        takes the states before the LM head.
        """
        arrays = (token_ids, positions, slot_mapping, query_starts, context_lens, block_tables, sample_rows)
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays), "step takes contiguous int32 arrays"

        def address(array: np.ndarray | None) -> int | None:
            return None if array is None else array.ctypes.data

        args = _StepArgs(
            token_ids.size, context_lens.size, sample_rows.size, block_tables.shape[1], cache.block_size, cache.kv_type,
            *(a.ctypes.data for a in arrays),
            *(None if p is None else ctypes.addressof(p) for p in (cache.keys, cache.values, cache.key_scales, cache.value_scales)),
            address(logits), address(token_out), address(hidden_out),
        )  # fmt: skip
        self._check(self._library.fe_fused_step(self._handle, ctypes.byref(args), self.num_threads))

    def _check(self, code: int) -> None:
        if code:
            raise FusedError(self._library.fe_fused_error().decode())
