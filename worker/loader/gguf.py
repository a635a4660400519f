"""Checkpoints in the GGUF format, dequantized tensor by tensor.

Tensor names are translated to Hugging Face's, and the row order with them: converters store q and k
of the ``llama`` architecture with the two halves of each head interleaved, which is undone here. So
weights in memory are the same whatever format they came in, and updates may come in either.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

from fastengine.model_files.gguf_header import GGUFTensorInfo, read_gguf
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.loader.checkpoint import ALL_ROWS, Checkpoint, StoredTensor
from fastengine.worker.loader.mapped_file import MappedFile, Moved

READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
INTERLEAVED_BY_CONVERTER = "LlamaForCausalLM"

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[a-z0-9_]+)\.(?P<kind>weight|bias)")
# Tensors that are no weights: the model's shape carries them (ModelSpec.rope_scaling).
NOT_WEIGHTS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; unknown names come back unchanged."""
    match = NAME.fullmatch(name)
    if match is None:
        return name
    if match["layer"] is None:
        stem = GLOBAL_NAMES.get(match["stem"])
        return name if stem is None else f"{stem}.{match['kind']}"
    stem = BLOCK_NAMES.get(match["stem"])
    return name if stem is None else f"model.layers.{match['layer']}.{stem}.{match['kind']}"


def with_hugging_face_rows(spec: ModelSpec) -> ModelSpec:
    """The shape of a GGUF's model once :class:`GGUFCheckpoint` has put q's and k's rows back in order."""
    return dataclasses.replace(spec, rope_interleaved=False) if spec.architecture == INTERLEAVED_BY_CONVERTER else spec


class GGUFCheckpoint(Checkpoint):
    """``files`` are all parts of one model, whose shape ``spec`` describes."""

    def __init__(self, files: list[Path], spec: ModelSpec, moved: Moved | None = None):
        self.source = str(files[0])
        self._files: list[MappedFile] = []
        self._tensors: dict[str, tuple[MappedFile, GGUFTensorInfo]] = {}
        self._heads_of: dict[str, int] = {}
        if spec.architecture == INTERLEAVED_BY_CONVERTER:
            self._heads_of = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_key_value_heads}
        for path in files:
            file = MappedFile(path, moved)
            self._files.append(file)
            for name, info in read_gguf(path).tensors.items():
                if name not in NOT_WEIGHTS:
                    self._tensors[hugging_face_name(name)] = (file, info)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, (_, info) in self._tensors.items()}

    def unreadable(self) -> list[str]:
        return [f"{name} has type {info.type_name}" for name, (_, info) in self._tensors.items() if info.type_name not in READABLE]

    def read(self, name: str, rows: slice = ALL_ROWS) -> np.ndarray:
        file, info = self._tensors[name]
        values = _dequantized(file, info, rows)
        head_dim = self._interleaved_head_dim(name, info)
        return halves_apart(values, head_dim) if head_dim else values

    def stored(self, name: str) -> StoredTensor | None:
        file, info = self._tensors[name]
        head_dim = self._interleaved_head_dim(name, info)
        order = halves_apart(np.arange(info.shape[0], dtype=np.int32), head_dim) if head_dim else None
        return StoredTensor(file.paged_in(file.view(info.offset, info.nbytes)), info.type_name, order)

    def _interleaved_head_dim(self, name: str, info: GGUFTensorInfo) -> int:
        """Size of the heads whose rows the converter interleaved; 0: it left them."""
        heads = self._heads_of.get(name.split(".")[-2])
        return info.shape[0] // heads if heads else 0

    def close(self) -> None:
        for file in self._files:
            file.close()


def halves_apart(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (0, d/2, 1, d/2 + 1, ...) of each head back in order (0, 1, ..., d - 1); whole heads only."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _dequantized(file: MappedFile, info: GGUFTensorInfo, rows: slice) -> np.ndarray:
    raw = file.view(info.offset, info.nbytes)
    if info.type_name == "F32":
        return file.paged_in(raw.view(np.dtype("<f4")).reshape(info.shape)[rows])
    if info.type_name == "F16":
        return file.paged_in(raw.view(np.dtype("<f2")).reshape(info.shape)[rows]).astype(np.float32)
    by_row = raw.reshape(*info.shape[:-1], -1) if len(info.shape) > 1 else raw.reshape(1, -1)
    kind = GGMLQuantizationType[info.type_name]
    if len(info.shape) == 1:
        return quants.dequantize(file.paged_in(by_row), kind).reshape(-1)[rows]
    return quants.dequantize(file.paged_in(by_row[rows]), kind)
