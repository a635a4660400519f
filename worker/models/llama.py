"""Decoder-only models of Llama's layout: Llama, Mistral, Qwen2, Qwen3, dense ERNIE 4.5.

What differs between them (biases, norms on q and k, tied embeddings, order of rotary pairs, sliding
window) stands in ModelSpec; the layers read it from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import paddle

from fastengine.model_files.spec import ModelSpec
from fastengine.worker.kv_cache import KVCache, KVShape, LayerCache
from fastengine.worker.layers.attention import Attention, kv_heads_of_rank
from fastengine.worker.layers.embedding import LMHead, VocabParallelEmbedding, VocabParallelTable
from fastengine.worker.layers.linear import Place
from fastengine.worker.layers.mlp import GatedMLP
from fastengine.worker.layers.norm import RMSNorm
from fastengine.worker.layers.rotary import cos_sin_table
from fastengine.worker.layers.weights import WeightPiece
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.step_inputs import StepInputs


class LlamaLayer:
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, place: Place, tp: TensorParallel, cos_sin: paddle.Tensor):
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, place, tp)
        self.attention = Attention(spec, index, place, tp, cos_sin)
        self.post_attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, place, tp)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, place, tp)

    def __call__(
        self, x: paddle.Tensor, residual: paddle.Tensor | None, inputs: StepInputs, cache: LayerCache
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """``x`` is the previous layer's output, not yet added to ``residual`` (None before the first layer)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x = self.input_norm.add(x, residual)
        x = self.attention(x, inputs, cache)
        x = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual

    def pieces(self, prefix: str) -> Iterator[WeightPiece]:
        yield from self.input_norm.pieces(f"{prefix}.input_layernorm")
        yield from self.attention.pieces(f"{prefix}.self_attn")
        yield from self.post_attention_norm.pieces(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.pieces(f"{prefix}.mlp")


class LlamaForCausalLM:
    """Token ids to final hidden states (``forward``), hidden states to logits (``logits``)."""

    def __init__(self, spec: ModelSpec, place: Place, tp: TensorParallel, max_position: int):
        self.spec = spec
        self.tp = tp
        cos_sin = paddle.to_tensor(cos_sin_table(spec, max_position))
        self.embedding = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, place, tp)
        self.layers = [LlamaLayer(spec, index, place, tp, cos_sin) for index in range(spec.num_hidden_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, place, tp)
        tied = spec.tie_word_embeddings
        table: VocabParallelTable = self.embedding if tied else VocabParallelTable(spec.vocab_size, spec.hidden_size, place, tp)
        self.lm_head = LMHead(table, tied)

    def forward(self, inputs: StepInputs, cache: KVCache) -> paddle.Tensor:
        """Hidden states ``[T, hidden]`` after the last norm; K and V of all T tokens are written."""
        x = self.embedding(inputs.token_ids)
        residual: paddle.Tensor | None = None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, residual = layer(x, residual, inputs, layer_cache)
        assert residual is not None, "a model without layers"
        return self.norm.add(x, residual)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """float32 ``[R, vocab]`` of hidden states ``[R, hidden]``."""
        return self.lm_head(hidden)

    def kv_shape(self, block_size: int, dtype: str) -> KVShape:
        heads, _ = kv_heads_of_rank(self.spec, self.tp)
        return KVShape(self.spec.num_hidden_layers, heads.stop - heads.start, block_size, self.spec.head_dim, dtype)

    def pieces(self) -> Iterator[WeightPiece]:
        yield from self.embedding.pieces("model.embed_tokens.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.pieces(f"model.layers.{index}")
        yield from self.norm.pieces("model.norm")
        yield from self.lm_head.pieces("lm_head")
