"""Weights arrive the same from every format, and what can't be used is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from fastengine.worker.loader.errors import WeightsError
from fastengine.worker.loader.gguf import READABLE, GGUFCheckpoint, hugging_face_name
from fastengine.worker.loader.safetensors import SafetensorsCheckpoint
from fastengine.worker.loader.weights import model_spec, open_checkpoint
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import Request
from tests.worker.models import hf_config, random_weights, write_model, write_safetensors

# K-quants come in blocks of 256: every row is as long.
CONFIG = hf_config(
    num_hidden_layers=1, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=64
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}
# numpy can't quantize these; their blocks are made up instead.
ONLY_DEQUANTIZED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter writes them for the llama architecture."""
    return values.reshape(num_heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path: Path, config: dict, weights: dict[str, np.ndarray], type_name: str) -> dict[str, np.ndarray]:
    """A llama GGUF with matrices of one type; returns what they dequantize to, in Hugging Face's row order."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    kind = GGMLQuantizationType[type_name]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    rng = np.random.default_rng(1)
    expected = {}
    for name, values in weights.items():
        stem = name.removesuffix(".weight")
        if values.ndim == 1:
            writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", values)
            expected[name] = values
            continue
        if type_name in ONLY_DEQUANTIZED:
            raw = _made_up_blocks(rng, values.shape, kind)
        else:
            raw = quants.quantize(values, kind)
        expected[name] = quants.dequantize(raw, kind).astype(np.float32)
        projection = stem.split(".")[-1]
        if projection in heads:
            raw = interleaved(raw, heads[projection])
        writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _made_up_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Random quantized rows whose scales (any two bytes may be one) are finite float16."""
    row_bytes = int(quants.quant_shape_to_byte_shape(shape, kind)[-1])
    return rng.integers(0, 0x3C, (shape[0], row_bytes), dtype=np.uint8)


@pytest.mark.parametrize("type_name", READABLE)
def test_every_gguf_type(tmp_path: Path, type_name: str) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, CONFIG, random_weights(CONFIG), type_name)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.shapes() == {name: values.shape for name, values in expected.items()}
    assert checkpoint.unreadable() == []
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)
    first_kv_head = slice(64, 128)
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name, first_kv_head), expected[name][first_kv_head])


def test_gguf_and_safetensors_are_one_model(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    write_gguf(tmp_path / "model.gguf", CONFIG, weights, "F32")
    from_gguf = loaded_host(tmp_path / "model.gguf")
    from_safetensors = loaded_host(write_model(tmp_path / "hf", CONFIG, weights))
    assert from_gguf.weights.checksum() == from_safetensors.weights.checksum()
    prompt = [5, 6, 7, 8, 9]
    answers = [driver_of(host).run([Request(prompt, 6)])[0].output for host in (from_gguf, from_safetensors)]
    assert answers[0] == answers[1]


def test_names_of_gguf_tensors() -> None:
    assert hugging_face_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.something_new.weight") == "blk.0.something_new.weight"


def test_sharded_safetensors_and_half_precision(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config)
    whole = loaded_host(write_model(tmp_path / "whole", config, {n: _rounded_to_bfloat16(a) for n, a in weights.items()}))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        bits = {name: (_rounded_to_bfloat16(weights[name]).view(np.uint32) >> 16).astype(np.uint16) for name in part}
        write_safetensors(sharded / file, bits, dict.fromkeys(part, "BF16"))
    weight_map = {name: file for file, part in parts.items() for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert loaded_host(sharded).weights.checksum() == whole.weights.checksum()


def _rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def checked(directory: Path, config: dict, weights: dict[str, np.ndarray]) -> str:
    """The error of loading ``weights`` as ``config``'s model."""
    with pytest.raises(WeightsError) as caught:
        loaded_host(write_model(directory, config, weights))
    return str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config, weights = hf_config(), random_weights(hf_config())
    name = "model.layers.1.mlp.up_proj.weight"
    without = {n: a for n, a in weights.items() if n != name}
    assert f"missing tensors: {name}" in checked(tmp_path / "a", config, without)
    assert "does not have: model.extra.weight" in checked(tmp_path / "b", config, {**weights, "model.extra.weight": np.zeros(3, np.float32)})
    wrong = checked(tmp_path / "c", config, {**weights, name: np.zeros((95, 64), np.float32)})
    assert f"{name} has shape [95, 64], the model needs [96, 64]" in wrong
    directory = write_model(tmp_path / "d", config, weights)
    write_safetensors(directory / "model.safetensors", {**weights, name: np.zeros((96, 64), np.int8)}, {name: "I8"})
    with pytest.raises(WeightsError, match="has element type I8"):
        loaded_host(directory)


def test_tied_models_may_bring_an_lm_head(tmp_path: Path) -> None:
    config = hf_config(tie_word_embeddings=True)
    weights = {**random_weights(config), "lm_head.weight": np.zeros((128, 64), np.float32)}
    loaded_host(write_model(tmp_path, config, weights))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:6], "too short"),
        (lambda data: data[: len(data) - 100], "truncated"),
        (lambda data: (1 << 40).to_bytes(8, "little") + data[8:], "not a safetensors file, or truncated"),
        (lambda data: data[:8] + b"[" + data[9:], "no safetensors header"),
        (lambda data: data.replace(b"[128, 64]", b"[129, 64]", 1), "can't be"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage, words: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, random_weights(hf_config()))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match=words) as caught:
        SafetensorsCheckpoint([path])
    assert str(path) in str(caught.value)


def test_wrong_format_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, random_weights(CONFIG), "F16")
    with pytest.raises(WeightsError, match="holds gguf weights, but format safetensors"):
        open_checkpoint(str(tmp_path / "model.gguf"), "safetensors")


def test_dummy_weights_are_the_same_every_time(tmp_path: Path) -> None:
    directory = write_model(tmp_path, hf_config(), {})
    first, second = (loaded_host(directory, load_format="dummy") for _ in range(2))
    assert first.weights.checksum() == second.weights.checksum() != 0


def test_spec_of_a_gguf_has_rows_in_order(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, random_weights(CONFIG), "F16")
    assert model_spec(str(tmp_path / "model.gguf")).rope_interleaved is False
    assert isinstance(open_checkpoint(str(tmp_path / "model.gguf")), GGUFCheckpoint)
