"""ModelSpec from a directory in Hugging Face layout: config.json, generation_config.json, tokenizer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.spec import ModelSpec

MAX_JSON_BYTES = 256 << 20

# Model types whose rotary embedding turns neighbouring elements (2i, 2i + 1).
INTERLEAVED_ROPE = frozenset({"ernie4_5", "ernie4_5_moe", "cohere", "glm", "glm4"})
# Model types with norms over each head's q and k whatever the config says.
QK_NORM = frozenset({"qwen3", "qwen3_moe"})
# Model types whose q, k and v have biases although the config doesn't say so.
IMPLICIT_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
# Model types whose attention_bias covers the output projection too.
BIAS_ON_OUTPUT = frozenset({"llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v2"})

# What ModelSpec has a field for; everything else stays in ``extra``.
SPEC_KEYS = frozenset(
    [
        "architectures",
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "partial_rotary_factor",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
    ]
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    """The little of tokenizer.json that is looked at here; the vocabulary is skipped while parsing."""

    added_tokens: list[_AddedToken] = []


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelFileError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(path, f"is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"can't be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ModelFileError(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, "must hold a JSON object")
    return value


def spec_from_directory(directory: Path) -> ModelSpec:
    """Read the configuration; raises ModelFileError that names the file and the key."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ModelFileError(directory, "holds no config.json: give a model directory in Hugging Face layout or a .gguf file")
    config = read_json(config_path)
    text = config.get("text_config")  # multi-modal models keep the decoder's settings in here
    if isinstance(text, dict) and "num_hidden_layers" in text:
        config = {**config, **text, "architectures": config.get("architectures")}
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return _Config(config_path, config).spec(generation, _tokenizer_eos_ids(directory))


class _Config:
    """Typed look-ups in a config.json, with errors that name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self._path = path
        self._values = values

    def spec(self, generation: dict[str, Any], tokenizer_eos_ids: list[int]) -> ModelSpec:
        model_type = str(self._values.get("model_type") or "")
        num_heads = self._integer("num_attention_heads")
        hidden_size = self._integer("hidden_size")
        theta, scaling, partial = self._rope()
        use_bias = self._flag("use_bias")
        attention_bias = self._flag("attention_bias") or use_bias
        eos = [*self._ids(self._values, "eos_token_id"), *self._ids(generation, "eos_token_id"), *tokenizer_eos_ids]
        bos = self._ids(self._values, "bos_token_id") or self._ids(generation, "bos_token_id")
        pad = self._ids(self._values, "pad_token_id")
        return ModelSpec(
            architecture=self._architecture(),
            model_type=model_type,
            num_hidden_layers=self._integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=self._integer("intermediate_size"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._integer("num_key_value_heads", num_heads),
            head_dim=self._integer("head_dim", hidden_size // num_heads),
            vocab_size=self._integer("vocab_size"),
            max_position_embeddings=self._integer("max_position_embeddings"),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=self._flag("tie_word_embeddings", model_type.startswith("ernie4_5")),
            attention_bias=attention_bias or model_type in IMPLICIT_QKV_BIAS,
            attention_output_bias=use_bias or (attention_bias and model_type in BIAS_ON_OUTPUT),
            mlp_bias=self._flag("mlp_bias") or use_bias,
            qk_norm=model_type in QK_NORM or self._flag("use_qk_norm"),
            rope_interleaved=self._flag("rope_interleave", model_type in INTERLEAVED_ROPE or model_type.startswith("deepseek_v")),
            partial_rotary_factor=partial,
            torch_dtype=str(self._values.get("dtype") or self._values.get("torch_dtype") or "float32"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            pad_token_id=pad[0] if pad else None,
            extra={key: value for key, value in self._values.items() if key not in SPEC_KEYS} | self._rope_by_layer_kind(),
        )

    def _architecture(self) -> str:
        names = self._values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self._error("architectures", 'must be a list with the model\'s class name, such as ["LlamaForCausalLM"]')
        return names[0]

    def _rope(self) -> tuple[float, dict[str, Any] | None, float]:
        """(theta, scaling or None, partial rotary factor) from ``rope_parameters`` or the older keys."""
        old = self._values.get("rope_scaling") or {}
        new = self._values.get("rope_parameters") or {}
        if not isinstance(old, dict) or not isinstance(new, dict):
            raise self._error("rope_parameters" if not isinstance(new, dict) else "rope_scaling", "must be an object")
        if _is_per_layer_kind(new):
            new = new.get("full_attention") or next(iter(new.values()))
        rope = {**old, **new}
        theta = rope.pop("rope_theta", None) or self._values.get("rope_theta") or 10000.0
        partial = rope.pop("partial_rotary_factor", None) or self._values.get("partial_rotary_factor") or 1.0
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if not isinstance(theta, int | float) or not isinstance(partial, int | float) or theta <= 0 or not 0 < partial <= 1:
            raise self._error("rope_parameters", f"unusable rope_theta {theta!r} or partial_rotary_factor {partial!r}")
        is_plain = kind == "default" and "mrope_section" not in rope
        scaling = None if is_plain else {**rope, "rope_type": "mrope" if kind == "default" else kind}
        return float(theta), scaling, float(partial)

    def _rope_by_layer_kind(self) -> dict[str, Any]:
        """``rope_parameters`` where kinds of layers differ in it: a model has to know that, or refuse."""
        rope = self._values.get("rope_parameters")
        if not isinstance(rope, dict) or not _is_per_layer_kind(rope):
            return {}
        entries = list(rope.values())
        return {} if entries.count(entries[0]) == len(entries) else {"rope_parameters": rope}

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self._error(key, "is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._error(key, f"must be an integer greater than 0, got {value!r}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(key, f"must be a number, got {value!r}")
        return float(value)

    def _flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, f"must be true or false, got {value!r}")
        return value

    def _ids(self, values: dict[str, Any], key: str) -> list[int]:
        value = values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._error(key, f"must be a token id or a list of them, got {value!r}")
        return [item for item in ids if item >= 0]

    def _error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self._path, f"{key}: {message}")


def _is_per_layer_kind(rope: dict[str, Any]) -> bool:
    return bool(rope) and all(isinstance(value, dict) for value in rope.values())


def _tokenizer_eos_ids(directory: Path) -> list[int]:
    """The id of tokenizer_config.json's ``eos_token``, if it is an added token."""
    config_path = directory / "tokenizer_config.json"
    if not config_path.is_file():
        return []
    config = read_json(config_path)
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return []
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        ids = [int(key) for key, entry in added.items() if isinstance(entry, dict) and entry.get("content") == text and key.isdigit()]
        if ids:
            return ids
    return [token.id for token in _added_tokens(directory / "tokenizer.json") if token.content == text]


def _added_tokens(path: Path) -> list[_AddedToken]:
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerJson).added_tokens
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelFileError(path, f"is not a usable tokenizer.json: {error}") from error
