"""What the fused step computes with: a decoder's sizes, its linears and vectors, and how they are packed.

Values only; :mod:`fastengine.custom_ops.fused` hands them to the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

# The layer that the model's own linears and vectors are of.
MODEL_LEVEL = -1


class Layout(IntEnum):
    """How a linear's weights are packed."""

    FLOAT32 = 0
    INT8 = 1  # eight bits and a scale per block of 32: exactly Q8_0 and Q4_0, others rounded
    INT4 = 2  # four bits and a minimum per block of 32, whose scale is a multiple of its pair's: Q4_0 and Q4_1 to half a percent; others rounded


class SourceKind(IntEnum):
    """Formats that weights are packed from; the quantized ones are GGUF's."""

    FLOAT32 = 0
    FLOAT16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    BFLOAT16 = 5


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
    qk_norm: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class Source:
    """Rows of one checkpoint tensor.

    ``data``: float32, float16 or (as uint16 bits) bfloat16 ``[rows, k]``, or a GGUF tensor's raw bytes (any shape of uint8).
    ``order``: int32 ``[rows]``, the row of ``data`` that each packed row takes; None: as they lie.
    """

    data: np.ndarray
    kind: SourceKind
    rows: int
    order: np.ndarray | None = None


@dataclass(frozen=True)
class Packing:
    """How a model's linears are packed; the embedding and LM head are INT8 beside INT4.

    ``screen``: beside an INT8 LM head, hold it in INT4 too (4/7 of its size). Of few greedy rows a step then reads that, and
    in eight bits only what may win: the tokens are the same.
    """

    layout: Layout
    screen: bool = True

    @property
    def table_layout(self) -> Layout:
        return Layout.FLOAT32 if self.layout == Layout.FLOAT32 else Layout.INT8

    @property
    def has_screen(self) -> bool:
        return self.screen and self.table_layout == Layout.INT8


@dataclass(frozen=True)
class LinearShape:
    rows: int
    k: int
    has_bias: bool = False
    paired: bool = False


def layer_linears(shape: FusedShape) -> dict[str, LinearShape]:
    """The linears of each layer: ``qkv`` is q, k and v one after the other, ``gate_up`` gate and up."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": LinearShape(q + 2 * kv, shape.hidden, shape.attention_bias),
        "output": LinearShape(shape.hidden, q, shape.output_bias),
        "gate_up": LinearShape(2 * shape.intermediate, shape.hidden, shape.mlp_bias, paired=True),
        "down": LinearShape(shape.hidden, shape.intermediate, shape.mlp_bias),
    }


def layer_vectors(shape: FusedShape) -> dict[str, int]:
    """Names and sizes of each layer's vectors."""
    vectors = {"input_norm": shape.hidden, "post_attention_norm": shape.hidden}
    return {**vectors, "query_norm": shape.head_dim, "key_norm": shape.head_dim} if shape.qk_norm else vectors
