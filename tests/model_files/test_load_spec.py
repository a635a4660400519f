"""load_spec over every kind of model file, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fastengine.model_files import ModelFileError, default_model_name, load_spec, weight_files

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def write_config(directory: Path, changes: dict[str, Any], **files: dict[str, Any]) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_defaults_of_an_old_config(tmp_path: Path) -> None:
    spec = load_spec(write_config(tmp_path, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}))
    assert (spec.head_dim, spec.num_key_value_heads) == (16, 4)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert spec.torch_dtype == "bfloat16"
    assert not spec.rope_interleaved
    assert spec.eos_token_ids == (2,)


def test_new_rope_parameters(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "partial_rotary_factor": 0.5}
    spec = load_spec(write_config(tmp_path, {"rope_parameters": rope}))
    assert (spec.rope_theta, spec.partial_rotary_factor) == (5e5, 0.5)
    assert spec.rope_scaling == {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


def test_rope_parameters_per_layer_kind(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    spec = load_spec(write_config(tmp_path, {"rope_parameters": rope}))
    assert (spec.rope_theta, spec.rope_scaling) == (1e6, None)
    # For a model to see that its layers differ.
    assert spec.extra["rope_parameters"] == rope
    alike = {"full_attention": rope["full_attention"], "sliding_attention": rope["full_attention"]}
    assert "rope_parameters" not in load_spec(write_config(tmp_path, {"rope_parameters": alike})).extra


def test_sections_of_positions_are_kept(tmp_path: Path) -> None:
    for rope in ({"type": "mrope", "mrope_section": [2, 3, 3]}, {"rope_type": "default", "mrope_section": [2, 3, 3]}):
        assert load_spec(write_config(tmp_path, {"rope_scaling": rope})).rope_scaling == {**rope, "rope_type": "mrope"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "qwen2"}, {"attention_bias": True, "attention_output_bias": False, "qk_norm": False}),
        ({"model_type": "qwen3", "head_dim": 32}, {"head_dim": 32, "qk_norm": True, "attention_bias": False}),
        ({"model_type": "llama", "attention_bias": True}, {"attention_bias": True, "attention_output_bias": True, "mlp_bias": False}),
        (
            {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
            {"attention_output_bias": False, "qk_norm": True, "rope_interleaved": False},
        ),
        (
            {"model_type": "ernie4_5", "use_bias": True},
            {"attention_output_bias": True, "mlp_bias": True, "rope_interleaved": True, "tie_word_embeddings": True},
        ),
        ({"model_type": "deepseek_v3"}, {"rope_interleaved": True}),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, {"rope_interleaved": False}),
    ],
)
def test_what_a_family_implies(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    spec = load_spec(write_config(tmp_path, changes))
    assert {name: getattr(spec, name) for name in expected} == expected


def test_family_keys_stay_in_extra(tmp_path: Path) -> None:
    spec = load_spec(write_config(tmp_path, {"num_experts": 8, "layer_types": ["full_attention"]}))
    assert spec.extra == {"num_experts": 8, "layer_types": ["full_attention"]}


def test_eos_from_three_files(tmp_path: Path) -> None:
    tokenizer_config = {"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": {"9": {"content": "<|end|>"}}}
    write_config(tmp_path, {"eos_token_id": [2, 5]}, generation_config={"eos_token_id": 7, "bos_token_id": 3}, tokenizer_config=tokenizer_config)
    spec = load_spec(tmp_path)
    assert spec.eos_token_ids == (2, 5, 7, 9)
    assert spec.bos_token_id == 3


def test_eos_from_tokenizer_json(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        {"eos_token_id": ...},
        tokenizer_config={"eos_token": "</s>"},
        tokenizer={"added_tokens": [{"id": 4, "content": "</s>"}], "model": {}},
    )
    assert load_spec(tmp_path).eos_token_ids == (4,)


def test_text_config_of_a_multi_modal_model(tmp_path: Path) -> None:
    inner = {key: LLAMA[key] for key in LLAMA if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "vl", "text_config": inner}))
    assert load_spec(tmp_path).model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size: is missing"),
        ({"hidden_size": "64"}, "hidden_size: must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: must be an integer greater than 0"),
        ({"architectures": ...}, "architectures: must be a list"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object"),
        ({"rope_theta": -1}, "unusable rope_theta"),
        ({"eos_token_id": "</s>"}, "eos_token_id: must be a token id"),
    ],
)
def test_bad_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_spec(write_config(tmp_path, changes))


def test_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        load_spec(tmp_path / "none")
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load_spec(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load_spec(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        load_spec(tmp_path)


def write_gguf(path: Path, architecture: str = "llama", tensors: tuple[str, ...] = (), **pairs: int | float | str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "context_length": 512}
    values |= {"attention.head_count": 4, "attention.head_count_kv": 2, **{key.replace("__", "."): value for key, value in pairs.items()}}
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "<|im_end|>", "plain <|end|>"])
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3, 3, 1])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32))
    for name in tensors:
        writer.add_tensor(name, np.full(8, 2.0, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_llama(tmp_path: Path) -> None:
    spec = load_spec(write_gguf(tmp_path / "m.gguf"))
    assert (spec.architecture, spec.head_dim, spec.vocab_size, spec.num_key_value_heads) == ("LlamaForCausalLM", 16, 5, 2)
    assert spec.rope_interleaved
    assert spec.tie_word_embeddings
    assert spec.bos_token_id == 1
    assert spec.eos_token_ids == (2, 3)


def test_gguf_qwen3_and_what_tensors_tell(tmp_path: Path) -> None:
    tensors = ("output.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_q.bias")
    spec = load_spec(
        write_gguf(tmp_path / "m.gguf", "qwen3", tensors, attention__key_length=32, rope__scaling__type="yarn", rope__scaling__factor=4.0)
    )
    assert (spec.architecture, spec.head_dim) == ("Qwen3ForCausalLM", 32)
    assert (spec.qk_norm, spec.attention_bias, spec.tie_word_embeddings, spec.rope_interleaved) == (True, True, False, False)
    assert spec.rope_scaling == {"rope_type": "yarn", "factor": 4.0}


def test_gguf_frequency_factors(tmp_path: Path) -> None:
    spec = load_spec(write_gguf(tmp_path / "m.gguf", tensors=("rope_freqs.weight",)))
    assert spec.rope_scaling == {"rope_type": "frequency_factors", "factors": [2.0] * 8}


def test_gguf_longrope(tmp_path: Path) -> None:
    tensors = ("rope_factors_long.weight", "rope_factors_short.weight")
    pairs = {"rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.5}
    spec = load_spec(write_gguf(tmp_path / "m.gguf", tensors=tensors, **pairs))
    factors = {"long_factor": [2.0] * 8, "short_factor": [2.0] * 8}
    assert spec.rope_scaling == {"rope_type": "longrope", **factors, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    with pytest.raises(ModelFileError, match=r"rope_factors_short\.weight: expected a row of F32, got none"):
        load_spec(write_gguf(tmp_path / "half.gguf", tensors=tensors[:1], **pairs))
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.original_context_length: is missing"):
        load_spec(write_gguf(tmp_path / "without.gguf", tensors=tensors))


def test_gguf_experts_get_hugging_face_names(tmp_path: Path) -> None:
    spec = load_spec(write_gguf(tmp_path / "m.gguf", "qwen3moe", expert_count=8, expert_used_count=2, expert_feed_forward_length=32))
    assert spec.extra == {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(("gating", "architecture"), [(2, "DeepseekV3ForCausalLM"), (1, "DeepseekV2ForCausalLM")])
def test_gguf_tells_deepseek_v2_from_v3(gating: int, architecture: str, tmp_path: Path) -> None:
    spec = load_spec(write_gguf(tmp_path / "m.gguf", "deepseek2", expert_gating_func=gating, attention__kv_lora_rank=32))
    assert (spec.architecture, spec.rope_interleaved, spec.extra) == (architecture, True, {"kv_lora_rank": 32})


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'mamba' is not supported; supported are .*llama"):
        load_spec(write_gguf(tmp_path / "m.gguf", "mamba"))


@pytest.mark.model
def test_default_model(default_model: Path) -> None:
    spec = load_spec(default_model)
    assert (spec.num_hidden_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (30, 576, 1536, 49152)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.rope_theta, spec.max_position_embeddings, spec.tie_word_embeddings, spec.rope_interleaved) == (1e5, 8192, True, True)
    assert spec.bos_token_id == 1
    assert 2 in spec.eos_token_ids


def test_golden_llama_configs(golden: Path) -> None:
    spec = load_spec(golden / "llama")
    assert (spec.architecture, spec.head_dim, spec.num_key_value_heads, spec.rope_scaling) == ("LlamaForCausalLM", 16, 2, None)
    assert load_spec(golden / "llama_tied").tie_word_embeddings
    assert [file.name for file in weight_files(golden / "llama")] == ["model.safetensors"]


def test_names(tmp_path: Path) -> None:
    assert default_model_name("/models/SmolLM2.Q4_1.gguf") == "SmolLM2.Q4_1"
    assert default_model_name("/models/Llama-3/") == "Llama-3"


def test_shards_in_order_and_missing_ones(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors"):
        weight_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "m-2.safetensors", "a": "m-1.safetensors", "c": "m-2.safetensors"}}))
    (tmp_path / "m-1.safetensors").touch()
    with pytest.raises(ModelFileError, match=r"1 of 2 weight files are missing: m-2\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "m-2.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["m-1.safetensors", "m-2.safetensors"]
    index.write_text(json.dumps({"weight_map": {"b": "../secret.safetensors"}}))
    with pytest.raises(ModelFileError, match="not a file of this directory"):
        weight_files(tmp_path)


def test_split_gguf(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"missing: m-00002-of-00002\.gguf"):
        load_spec(first)
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", tensors=("output.weight",))
    assert weight_files(first) == weight_files(tmp_path) == [first, second]
    assert not load_spec(tmp_path).tie_word_embeddings


def test_several_ggufs_in_a_directory(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelFileError, match="several GGUF files"):
        load_spec(tmp_path)


def test_no_paddle_is_imported() -> None:
    code = "import sys, fastengine.model_files; sys.exit(any(name.split('.')[0] in ('paddle', 'gguf', 'transformers') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
