"""Small tokenizers of every kind, built in a moment: byte-level BPE, SentencePiece with byte fallback, WordPiece."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fastengine.config import ModelConfig
from fastengine.model_files import load_spec
from fastengine.text.gguf_tokenizer import load_gguf_tokenizer
from fastengine.text.hf_tokenizer import load_hf_tokenizer
from fastengine.text.load import load_tokenizer
from fastengine.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567890 o'clock!\n\n",
    "def f(x):\n    return x + 1  # naïve café — 你好，世界！ 😀 👩‍🚀 नमस्ते مرحبا\r\n",
    "Hello hello the the and of to in that is was for it with as his on be at by I this had",
] * 3
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte_level")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: Path) -> Tokenizer:
    return load_hf_tokenizer(byte_level_directory, min_vocab_size=512)


def sentence_piece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, types) with distinct scores, as SentencePiece's BPE training gives them."""
    pieces = [
        "▁",
        "▁t",
        "he",
        "▁the",
        "▁a",
        "in",
        "an",
        "▁h",
        "ll",
        "▁he",
        "llo",
        "▁hello",
        "on",
        "é",
        "你",
        "好",
        "你好",
        "▁▁",
        "▁fox",
        "fo",
        "ox",
        "▁f",
    ]
    characters = sorted({character for text in CORPUS for character in text.replace(" ", "▁") if ord(character) < 0x250} - set(pieces) - {"\n", "\r"})
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, *characters, "<|im_end|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(characters)), 3]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(characters))] + [0.0]
    return tokens, scores, types


@pytest.fixture(scope="session")
def sentence_piece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    tokens, scores, types = sentence_piece_vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", scores)
    writer.add_array("tokenizer.ggml.token_type", types)
    for key, value in {"unknown": 0, "bos": 1, "eos": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def sentence_piece(sentence_piece_file: Path) -> Tokenizer:
    return load_gguf_tokenizer(sentence_piece_file)


@pytest.fixture(scope="session")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary without exact bytes: pieces are joined by rules, not by concatenation."""
    path = tmp_path_factory.mktemp("word_piece") / "tokenizer.json"
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False))
    backend.save(str(path))
    return load_hf_tokenizer(path)


@pytest.fixture(scope="session")
def smollm(default_model: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(default_model)), load_spec(default_model))


@pytest.fixture(params=["byte_level", "sentence_piece", pytest.param("smollm", marks=pytest.mark.model)])
def exact_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each tokenizer whose tokens have exact bytes."""
    tokenizer = request.getfixturevalue(request.param)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
