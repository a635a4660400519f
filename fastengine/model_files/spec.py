"""ModelSpec: a model's shape and vocabulary limits, the same whatever file format it came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    """Read once from ``config.json`` or a GGUF header; the worker builds the model from the same object.

    ``architecture`` is the Hugging Face class name (``LlamaForCausalLM``); a GGUF's is mapped to it.
    ``head_dim`` is explicit. ``rope_scaling`` is the checkpoint's own dictionary or None. Everything
    family-specific (experts, latent attention, ...) stays in ``extra`` under its Hugging Face name.
    """

    architecture: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # NeoX: pairs (i, i + d/2). Interleaved: pairs (2i, 2i + 1), as GGUF stores Llama's q and k rows.
    rope_interleaved: bool = False
    partial_rotary_factor: float = 1.0
    torch_dtype: str = "float32"
    bos_token_id: int | None = None
    # Every id that ends a sequence: config, generation config and tokenizer taken together.
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
