"""Self-attention over the paged KV cache, heads split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

from fastengine import custom_ops
from fastengine.model_files.spec import ModelSpec
from fastengine.worker.kv_cache import LayerCache
from fastengine.worker.layers.linear import ColumnParallelLinear, OutputPart, Place, RowParallelLinear, split_output
from fastengine.worker.layers.norm import RMSNorm
from fastengine.worker.layers.weights import WeightPiece
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.step_inputs import StepInputs


def kv_heads_of_rank(spec: ModelSpec, tp: TensorParallel) -> tuple[slice, bool]:
    """The KV heads this rank holds and whether it counts them as its own.

    With more ranks than KV heads, ``size / kv_heads`` neighbouring ranks hold a copy of the same head.
    """
    total = spec.num_key_value_heads
    if tp.size <= total:
        share = tp.share(total, "key-value heads")
        return slice(tp.rank * share, (tp.rank + 1) * share), True
    if tp.size % total:
        raise ValueError(f"tensor_parallel_size {tp.size} is no multiple of the model's {total} key-value heads")
    copies = tp.size // total
    head = tp.rank // copies
    return slice(head, head + 1), tp.rank % copies == 0


def sliding_window_of_layer(spec: ModelSpec, layer_index: int) -> int:
    """Tokens a layer looks back over, itself included; 0 for all."""
    extra = spec.extra
    if not extra.get("sliding_window") or not extra.get("use_sliding_window", True):
        return 0
    if extra.get("layer_types"):
        slides = extra["layer_types"][layer_index] == "sliding_attention"
    else:
        slides = layer_index >= extra.get("max_window_layers", 0)
    return int(extra["sliding_window"]) if slides else 0


class Attention:
    """``[T, hidden] -> [T, hidden]``: projections, rotary embedding with KV write, paged attention, output."""

    def __init__(self, spec: ModelSpec, layer_index: int, place: Place, tp: TensorParallel, cos_sin: paddle.Tensor):
        dim = spec.head_dim
        kv_heads, counted = kv_heads_of_rank(spec, tp)
        self.num_heads = tp.share(spec.num_attention_heads, "attention heads")
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self.interleaved = spec.rope_interleaved
        self.eps = spec.rms_norm_eps
        self.scale = dim**-0.5
        self.sliding_window = sliding_window_of_layer(spec, layer_index)
        self.cos_sin = cos_sin
        kv_rows = slice(kv_heads.start * dim, kv_heads.stop * dim)
        parts = [
            split_output("q_proj", spec.num_attention_heads * dim, tp),
            *(OutputPart(name, spec.num_key_value_heads * dim, kv_rows, counted) for name in ("k_proj", "v_proj")),
        ]
        self.qkv = ColumnParallelLinear(spec.hidden_size, parts, spec.attention_bias, place)
        self.output = RowParallelLinear(spec.num_attention_heads * dim, spec.hidden_size, spec.attention_output_bias, place, tp)
        self.q_norm = RMSNorm(dim, self.eps, place, tp) if spec.qk_norm else None
        self.k_norm = RMSNorm(dim, self.eps, place, tp) if spec.qk_norm else None

    def __call__(self, hidden: paddle.Tensor, inputs: StepInputs, cache: LayerCache) -> paddle.Tensor:
        key_cache, value_cache, scales = cache.key.tensor, cache.value.tensor, cache.scale_tensors()
        options: dict[str, Any] = {}
        if inputs.plans is not None:
            options = inputs.plans.options(inputs, self.num_heads, self.num_kv_heads, cache.block_size, self.sliding_window)
        query = custom_ops.rotary_write_kv_packed(
            self.qkv(hidden),
            self.num_heads,
            self.num_kv_heads,
            inputs.positions,
            self.cos_sin,
            inputs.slot_mapping,
            key_cache,
            value_cache,
            interleaved=self.interleaved,
            q_norm=None if self.q_norm is None else self.q_norm.weight.tensor,
            k_norm=None if self.k_norm is None else self.k_norm.weight.tensor,
            epsilon=self.eps,
            **scales,
        )
        mixed = custom_ops.paged_attention(
            query,
            key_cache,
            value_cache,
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            self.scale,
            sliding_window=self.sliding_window,
            **scales,
            **options,
        )
        return self.output(mixed.flatten(1))

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        yield from self.qkv.pieces(prefix)
        yield from self.output.pieces(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.pieces(f"{prefix}.q_norm")
            yield from self.k_norm.pieces(f"{prefix}.k_norm")
