"""ModelSpec from a GGUF header: its architecture and key names mapped to Hugging Face's."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.gguf_header import GGUFHeader, read_gguf
from fastengine.model_files.spec import ModelSpec

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")

# Control tokens by which chat models end a turn or a text; converters often record only one of them.
END_OF_TURN_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
    }
)
CONTROL_TOKEN = 3
GATING_SIGMOID = 2


@dataclass(frozen=True)
class _Family:
    """How one GGUF architecture is called by Hugging Face, and how its rows are stored."""

    architecture: str
    model_type: str
    rope_interleaved: bool = False
    # GGUF key (without the architecture's prefix) -> Hugging Face config key.
    extra_keys: dict[str, str] = field(default_factory=dict)


MOE_KEYS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
DEEPSEEK_KEYS = {
    **MOE_KEYS,
    "expert_count": "n_routed_experts",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": "gguf_key_length",
    "attention.value_length": "gguf_value_length",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
ERNIE_MOE_KEYS = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
}

FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", "llama", rope_interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe", extra_keys={**MOE_KEYS, "expert_count": "num_experts"}),
    "deepseek2": _Family("DeepseekV3ForCausalLM", "deepseek_v3", rope_interleaved=True, extra_keys=DEEPSEEK_KEYS),
    "glm4moe": _Family("Glm4MoeForCausalLM", "glm4_moe", extra_keys={**MOE_KEYS, "expert_count": "n_routed_experts"}),
    "ernie4_5": _Family("Ernie4_5ForCausalLM", "ernie4_5", rope_interleaved=True),
    "ernie4_5-moe": _Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", rope_interleaved=True, extra_keys=ERNIE_MOE_KEYS),
}


def split_files(path: Path) -> list[Path]:
    """All files of a GGUF that may be split (``name-00001-of-00003.gguf``), in order. Raises ModelFileError."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    files = [path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFileError(path, f"is one of {count} files, of which are missing: {', '.join(missing[:5])}")
    return files


def read_split_gguf(path: Path) -> GGUFHeader:
    """The first file's metadata with the tensors of all files (only names, shapes and types count here)."""
    files = split_files(path)
    first = read_gguf(files[0])
    tensors = dict(first.tensors)
    for file in files[1:]:
        tensors.update(read_gguf(file).tensors)
    return dataclasses.replace(first, tensors=tensors)


def spec_from_gguf(path: Path) -> ModelSpec:
    """Read the header; raises ModelFileError that names the file and the key."""
    return _Metadata(read_split_gguf(path)).spec()


class _Metadata:
    """Typed look-ups under the architecture's prefix, with errors that name the file and the key."""

    def __init__(self, header: GGUFHeader):
        self._header = header
        self._values = header.metadata
        name = self._values.get("general.architecture")
        if name not in FAMILIES:
            raise self._error("general.architecture", f"{name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
        self._prefix = f"{name}."
        self._family = FAMILIES[name]

    def spec(self) -> ModelSpec:
        tensors = self._header.tensors
        num_layers = self._integer("block_count")
        num_extra_layers = self._values.get(f"{self._prefix}nextn_predict_layers", 0)
        num_heads = self._integer("attention.head_count")
        hidden_size = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        rope_dim = self._integer("rope.dimension_count", head_dim)
        extra = {name: self._plain(key) for key, name in self._family.extra_keys.items() if self._prefix + key in self._values}
        if num_extra_layers:
            extra["num_nextn_predict_layers"] = num_extra_layers
        return ModelSpec(
            architecture=self._architecture(),
            model_type=self._family.model_type,
            num_hidden_layers=num_layers - num_extra_layers,
            hidden_size=hidden_size,
            intermediate_size=self._integer("feed_forward_length"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_position_embeddings=self._integer("context_length"),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon", 1e-6),
            rope_theta=self._number("rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            attention_output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            rope_interleaved=self._family.rope_interleaved,
            partial_rotary_factor=min(1.0, rope_dim / head_dim),
            torch_dtype="bfloat16" if any(t.type_name == "BF16" for t in tensors.values()) else "float16",
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_ids=self._eos_token_ids(),
            pad_token_id=self._token_id("padding_token_id"),
            extra=extra,
        )

    def _architecture(self) -> str:
        # GGUF calls DeepSeek V2 and V3 the same; V3's experts are chosen by sigmoid scores.
        if self._family.model_type == "deepseek_v3" and self._values.get(f"{self._prefix}expert_gating_func") != GATING_SIGMOID:
            return "DeepseekV2ForCausalLM"
        return self._family.architecture

    def _vocab_size(self) -> int:
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelFileError(self._header.path, "has no tensor token_embd.weight: not a language model, or a part of a split file")
        return embedding.shape[0]

    def _rope_scaling(self) -> dict[str, Any] | None:
        """As Hugging Face spells it; ``frequency_factors`` divide the inverse frequencies one by one."""
        if "rope_freqs.weight" in self._header.tensors:
            return {"rope_type": "frequency_factors", "factors": self._factors("rope_freqs.weight")}
        if "rope_factors_long.weight" in self._header.tensors:
            return self._longrope()
        kind = self._values.get(f"{self._prefix}rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0)}
        original = self._integer("rope.scaling.original_context_length", 0)
        if original:
            scaling["original_max_position_embeddings"] = original
        if f"{self._prefix}rope.scaling.yarn_log_multiplier" in self._values:
            # Stored as a tenth of mscale_all_dim.
            scaling["mscale_all_dim"] = self._number("rope.scaling.yarn_log_multiplier", 0.0) * 10.0
        return scaling

    def _longrope(self) -> dict[str, Any]:
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        for which in ("long", "short"):
            scaling[f"{which}_factor"] = self._factors(f"rope_factors_{which}.weight")
        scaling["original_max_position_embeddings"] = self._integer("rope.scaling.original_context_length")
        if f"{self._prefix}rope.scaling.attn_factor" in self._values:
            scaling["attention_factor"] = self._number("rope.scaling.attn_factor", 1.0)
        return scaling

    def _factors(self, name: str) -> list[float]:
        """A tensor of rotary frequency factors: it belongs to the model's shape, not to its weights."""
        factors = self._header.tensors.get(name)
        if factors is None or factors.type_name != "F32" or factors.nbytes > 4096 or len(factors.shape) != 1:
            found = "none" if factors is None else f"{factors.type_name} {factors.shape}"
            raise ModelFileError(self._header.path, f"{name}: expected a row of F32, got {found}")
        values: list[float] = np.fromfile(self._header.path, np.dtype("<f4"), factors.shape[0], offset=factors.offset).tolist()
        return values

    def _eos_token_ids(self) -> tuple[int, ...]:
        named = [self._token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        ids = [token_id for token_id in named if token_id is not None]
        types = self._values.get("tokenizer.ggml.token_type")
        tokens = self._values.get("tokenizer.ggml.tokens")
        if isinstance(types, np.ndarray) and tokens is not None:
            control = [int(i) for i in np.flatnonzero(types[: len(tokens)] == CONTROL_TOKEN)]
            texts = tokens.byte_strings()
            ids += [token_id for token_id in control if texts[token_id].decode("utf-8", "replace") in END_OF_TURN_TEXTS]
        return tuple(dict.fromkeys(ids))

    def _token_id(self, key: str) -> int | None:
        value = self._values.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < self._vocab_size() else None

    def _plain(self, key: str) -> Any:
        value = self._values[self._prefix + key]
        return value.tolist() if isinstance(value, np.ndarray) else value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(self._prefix + key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some converters write one value per layer
        if not isinstance(value, int) or isinstance(value, bool) or (value <= 0 and value != default):
            found = "is missing" if value is None else f"must be one integer greater than 0, got {value!r}"
            raise self._error(self._prefix + key, found)
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._values.get(self._prefix + key, default)
        if not isinstance(value, int | float):
            raise self._error(self._prefix + key, f"must be a number, got {value!r}")
        return float(value)

    def _error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self._header.path, f"{key}: {message}")
