"""Models for tests: the tiny golden checkpoints in this process, and random ones written on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fastengine.config import EngineConfig

BLOCK_SIZE = 8
NUM_BLOCKS = 400


def config_for(path: Path | str, **flags: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": str(path),
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 40,
        "max_model_len": 256,
        "cpu_threads": 2,
        "device": "cpu",
    }
    return EngineConfig.from_flags(**{**defaults, **flags})


def hf_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return {**config, **changes}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors of a Llama-like model under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}.self_attn.{n}.weight": (size, hidden) for n, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (hidden, q), f"{prefix}.mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}.mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
    return {
        name: (1 + 0.1 * rng.standard_normal(shape) if name.endswith("norm.weight") else 0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """A file in the safetensors layout; ``dtypes`` overrides F32 (BF16 tensors are given as uint16 bits)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {"dtype": (dtypes or {}).get(name, "F32"), "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values()))


def write_model(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A model directory in Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)
    return directory
