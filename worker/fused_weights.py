"""Weights of the fused step: packed tensor by tensor from a checkpoint into one piece of memory.

What :class:`~fastengine.worker.loader.weights.ModelWeights` is to the plain layers. A tensor goes from
the file's own bytes straight into its packed form, so that the weights are never held twice, and an
update packs into the same memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastengine.custom_ops.fused import (
    MODEL_LEVEL,
    FusedModel,
    FusedShape,
    Packing,
    Source,
    SourceKind,
    hash_rows,
)
from fastengine.custom_ops.library import LIBRARY_PATH
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.layers.rotary import cos_sin_table
from fastengine.worker.loader.checkpoint import Checkpoint
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.loader.weights import MASK64, Progress, check_tensors, hash_keys, hash_of_bits
from fastengine.worker.memory import Storage
from fastengine.worker.packed_cache import PackedCache, file_digest, processor_features

# Element types whose bytes are packed as they are; others are read as float32 first.
PACKED_AS_STORED = {
    "F32": SourceKind.FLOAT32,
    "F16": SourceKind.FLOAT16,
    "BF16": SourceKind.BFLOAT16,
    "Q4_0": SourceKind.Q4_0,
    "Q4_1": SourceKind.Q4_1,
    "Q8_0": SourceKind.Q8_0,
}


@dataclass(frozen=True)
class PackedTensor:
    """The checkpoint tensor ``name`` fills rows ``first_row`` and on of ``target``, a linear, its bias or a vector."""

    name: str
    shape: tuple[int, ...]
    target: str
    layer: int = MODEL_LEVEL
    first_row: int = 0
    is_bias: bool = False


def packed_tensors(spec: ModelSpec) -> Iterator[PackedTensor]:
    """Every tensor of the model, in the checkpoint's (Hugging Face's) names."""
    hidden = spec.hidden_size
    yield PackedTensor("model.embed_tokens.weight", (spec.vocab_size, hidden), "embedding")
    for layer in range(spec.num_hidden_layers):
        yield from _layer_tensors(spec, layer)
    yield PackedTensor("model.norm.weight", (hidden,), "final_norm")
    if not spec.tie_word_embeddings:
        yield PackedTensor("lm_head.weight", (spec.vocab_size, hidden), "lm_head")


def _layer_tensors(spec: ModelSpec, layer: int) -> Iterator[PackedTensor]:
    prefix = f"model.layers.{layer}"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    linears = [
        ("self_attn.q_proj", "qkv", 0, q, hidden, spec.attention_bias),
        ("self_attn.k_proj", "qkv", q, kv, hidden, spec.attention_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, hidden, spec.attention_bias),
        ("self_attn.o_proj", "output", 0, hidden, q, spec.attention_output_bias),
        ("mlp.gate_proj", "gate_up", 0, inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", "gate_up", inner, inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", "down", 0, hidden, inner, spec.mlp_bias),
    ]
    vectors = [("input_layernorm", "input_norm", hidden), ("post_attention_layernorm", "post_attention_norm", hidden)]
    if spec.qk_norm:
        vectors += [("self_attn.q_norm", "query_norm", spec.head_dim), ("self_attn.k_norm", "key_norm", spec.head_dim)]
    for name, target, size in vectors:
        yield PackedTensor(f"{prefix}.{name}.weight", (size,), target, layer)
    for name, target, first_row, rows, k, has_bias in linears:
        yield PackedTensor(f"{prefix}.{name}.weight", (rows, k), target, layer, first_row)
        if has_bias:
            yield PackedTensor(f"{prefix}.{name}.bias", (rows,), target, layer, first_row, is_bias=True)


def fused_shape(spec: ModelSpec, max_position: int) -> FusedShape:
    return FusedShape(
        num_layers=spec.num_hidden_layers,
        hidden=spec.hidden_size,
        num_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        rms_epsilon=spec.rms_norm_eps,
        cos_sin=cos_sin_table(spec, max_position),
        rope_interleaved=spec.rope_interleaved,
        tied=spec.tie_word_embeddings,
        qk_norm=spec.qk_norm,
        attention_bias=spec.attention_bias,
        output_bias=spec.attention_output_bias,
        mlp_bias=spec.mlp_bias,
    )


class FusedWeights:
    """Owns the memory that ``model`` computes with."""

    def __init__(self, library: ctypes.CDLL, spec: ModelSpec, packing: Packing, max_position: int, num_threads: int):
        self.model = FusedModel(library, fused_shape(spec, max_position), packing, num_threads)
        self._library = library
        self._num_threads = num_threads
        self._spec = spec
        self._tensors = list(packed_tensors(spec))
        self._may_be_left_over = {"lm_head.weight"} if spec.tie_word_embeddings else set()
        self._arena = Storage((self.model.num_bytes,), "uint8", "cpu", huge_pages=True)
        self._hashes: dict[str, int] = {}

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors this model is made of."""
        return {tensor.name: tensor.shape for tensor in self._tensors}

    def storages(self) -> list[Storage]:
        return [self._arena]

    def allocate(self) -> None:
        self._arena.allocate()
        self.model.bind(self._arena.bits((slice(None),)))

    def load(self, checkpoint: Checkpoint, cache: PackedCache, source: str, progress: Progress | None = None) -> None:
        """:meth:`allocate` and :meth:`fill`, or what ``cache`` kept of an earlier start from ``source``."""
        identity = self._packed_identity(source)
        packed = cache.find(identity)
        if packed is not None and len(packed.memory) == self._arena.nbytes and packed.hashes.keys() == self.expected_shapes().keys():
            self._arena.adopt(packed.memory)
            self._hashes = dict(packed.hashes)
            self.allocate()
            return
        self.allocate()
        self.fill(checkpoint, progress)
        cache.store(identity, self._arena.bits((slice(None),)), self._hashes)

    def _packed_identity(self, source: str) -> dict[str, str]:
        """What packed bytes depend on. The operators' own file stands for the version of the layout."""
        return {
            "source": source,
            "model": repr(self._spec),
            "packing": f"{self.model.packing} {self.model.num_bytes} bytes, {self.model.instruction_set}",
            "operators": file_digest(LIBRARY_PATH),
            "processor": processor_features(),
        }

    def drop(self) -> None:
        self.model.bind(None)
        self._arena.drop()

    def check(self, checkpoint: Checkpoint, *, partial: bool = False) -> None:
        """Compare names and shapes without reading data; ``partial`` allows tensors to be absent. Raises WeightsError."""
        check_tensors(self.expected_shapes(), checkpoint, self._may_be_left_over, partial=partial)

    def fill(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        """Pack ``checkpoint`` (checked before) in place, tensor by tensor."""
        names = checkpoint.shapes()
        tensors = [tensor for tensor in self._tensors if tensor.name in names]
        total = sum(math.prod(tensor.shape) for tensor in tensors) or 1
        done = 0
        for tensor in tensors:
            self._hashes[tensor.name] = self._store(tensor, checkpoint)
            done += math.prod(tensor.shape)
            if progress is not None:
                progress(done / total)

    def checksum(self, moved: Moved | None = None) -> int:
        """The hash that :class:`ModelWeights` has of the same checkpoint in float32, modulo 2**64.

        It is of the values as they were loaded; packing to fewer bits does not change it. It is known already: nobody needs
        to be told that it moves.
        """
        return sum(self._hashes.values()) & MASK64

    def checksum_of(self, checkpoint: Checkpoint) -> int:
        """What :meth:`checksum` would be after :meth:`fill`, without touching what is loaded."""
        return sum(self._hash(tensor, checkpoint, None) for tensor in self._tensors) & MASK64

    def _store(self, tensor: PackedTensor, checkpoint: Checkpoint) -> int:
        """Packs one tensor and returns its hash."""
        if len(tensor.shape) == 1:
            values = checkpoint.read(tensor.name)
            if tensor.is_bias:
                self.model.set_bias(tensor.target, values, tensor.layer, first_row=tensor.first_row)
            else:
                self.model.set_vector(tensor.target, values, tensor.layer)
            return hash_of_bits(tensor.name, tensor.shape, _bits(values))
        source = _source(tensor, checkpoint)
        self.model.set_rows(tensor.target, source, tensor.layer, first_row=tensor.first_row)
        return self._hash(tensor, checkpoint, source)

    def _hash(self, tensor: PackedTensor, checkpoint: Checkpoint, source: Source | None) -> int:
        if len(tensor.shape) == 1:
            return hash_of_bits(tensor.name, tensor.shape, _bits(checkpoint.read(tensor.name)))
        row_keys, column_keys = hash_keys(tensor.name, tensor.shape)
        source = source or _source(tensor, checkpoint)
        return hash_rows(self._library, source, tensor.shape[1], row_keys, column_keys, self._num_threads)


def _source(tensor: PackedTensor, checkpoint: Checkpoint) -> Source:
    stored = checkpoint.stored(tensor.name)
    if stored is not None and stored.type_name in PACKED_AS_STORED:
        return Source(stored.data, PACKED_AS_STORED[stored.type_name], tensor.shape[0], stored.row_order)
    return Source(checkpoint.read(tensor.name), SourceKind.FLOAT32, tensor.shape[0])


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
