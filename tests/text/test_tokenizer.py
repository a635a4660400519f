"""Tokenizers from every kind of file: the right ids, exact bytes, clear refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fastengine.config import ModelConfig
from fastengine.model_files import ModelFileError, ModelSpec
from fastengine.text.gguf_tokenizer import load_gguf_tokenizer
from fastengine.text.hf_tokenizer import load_hf_tokenizer, read_chat_templates
from fastengine.text.load import load_tokenizer
from fastengine.text.pre_tokenizers import PRE_TOKENIZERS
from fastengine.text.token_pieces import byte_level_alphabet, byte_level_pieces
from fastengine.text.tokenizer import Tokenizer, TokenizerError
from tests.conftest import load_golden
from tests.text.conftest import sentence_piece_vocabulary

SPEC = ModelSpec("LlamaForCausalLM", "llama", 2, 64, 96, 4, 2, 16, 512, 512, 1e-6, 1e4, eos_token_ids=(2, 4))


@pytest.mark.model
def test_golden_ids_and_back(smollm: Tokenizer) -> None:
    cases = load_golden("smollm2_tokens.json")
    assert len(cases) == 46
    for case in cases:
        assert smollm.encode(case["text"]) == case["ids"], case["text"]
        assert smollm.decode(case["ids"], skip_special_tokens=False) == case["text"]
    assert smollm.encode_batch([case["text"] for case in cases]) == [case["ids"] for case in cases]


@pytest.mark.model
def test_default_model_properties(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.add_bos) == (49152, 1, False)
    assert 2 in smollm.eos_token_ids
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.token_text(504) == "The"
    assert smollm.token_bytes(198) == b"\n"
    assert smollm.decode([1, 504, 2]) == "The"


def test_bytes_join_to_the_text(exact_tokenizer: Tokenizer) -> None:
    text = "The naïve fox: 你好 😀"
    joined = b"".join(exact_tokenizer.token_bytes(token_id) for token_id in exact_tokenizer.encode(text))
    assert joined.decode().removeprefix(" ") == text


def test_own_decoding_agrees_with_the_library(byte_level: Tokenizer, byte_level_directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_directory / "tokenizer.json"))
    for text in ("plain", "naïve café 你好 😀", "<|im_start|>x<|im_end|>", "�"):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert byte_level.encode(text) == ids
        for end in range(len(ids) + 1):
            for skip in (True, False):
                assert byte_level.decode(ids[:end], skip_special_tokens=skip) == backend.decode(ids[:end], skip_special_tokens=skip)


def test_ids_past_the_vocabulary(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 512
    assert byte_level.token_bytes(511) == b""  # the model's padding rows stand for nothing
    assert byte_level.token_text(511) == ""
    assert byte_level.decode([511]) == ""
    for bad in (512, -1, 1 << 40):
        for call in (byte_level.token_bytes, byte_level.token_text, lambda token_id: byte_level.decode([token_id])):
            with pytest.raises(TokenizerError, match="not in the vocabulary"):
                call(bad)


def test_half_a_surrogate_pair_is_refused(exact_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        exact_tokenizer.encode("a\ud800b")


def test_byte_level_alphabet_is_the_librarys() -> None:
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(0x80):  # what can be said in one ASCII character
        shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))[0][0]
        assert byte_level_alphabet()[shown] == byte
    assert byte_level_pieces(["Ġa", "好", "\uffff", "é"]) == [b" a", "好".encode(), "\uffff".encode(), b"\xe9"]


# SentencePiece ---------------------------------------------------------------------------------------


def sentence_piece_reference(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE, naively: join the neighbours that make the best scored token until none does."""
    ids = {token: i for i, token in enumerate(tokens) if i >= 259 and token != "<|im_end|>"}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [token for symbol in symbols for token in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="thelo hanifx ß你好\n", max_size=24))
def test_sentence_piece_equals_the_reference(sentence_piece: Tokenizer, text: str) -> None:
    tokens, scores, _ = sentence_piece_vocabulary()
    ids = sentence_piece.encode(text)
    assert ids == sentence_piece_reference(text, tokens, scores)
    assert sentence_piece.decode(ids) == text


def test_sentence_piece_adds_bos(sentence_piece: Tokenizer) -> None:
    assert sentence_piece.add_bos
    assert sentence_piece.encode("a", add_special_tokens=True)[0] == 1
    assert sentence_piece.token_bytes(3 + 0xE4) == b"\xe4"
    assert sentence_piece.special_ids == {0, 1, 2, sentence_piece.token_id("<|im_end|>")}


def test_exactly_one_bos_in_a_chat(sentence_piece: Tokenizer, byte_level: Tokenizer) -> None:
    plain = sentence_piece.encode("hello")
    assert sentence_piece.encode_chat("hello") == [1, *plain]
    for rendered in ("<s>hello", "<s><s>hello"):
        assert sentence_piece.encode_chat(rendered)[:2] == [1, plain[0]]
    assert not byte_level.add_bos
    assert byte_level.encode_chat("hello") == byte_level.encode("hello")
    assert sentence_piece.encode_chat("") == [1]


# GGUF byte-level -------------------------------------------------------------------------------------


def write_bpe_gguf(path: Path, source: Tokenizer, directory: Path, **changes: Any) -> Path:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": sorted(model["vocab"], key=model["vocab"].get),
        "token_type": [3] * 5 + [1] * (len(model["vocab"]) - 5),
        "merges": [" ".join(pair) for pair in model["merges"]],
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif value is not None:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.add_string("tokenizer.chat_template", "default one")
    writer.add_string("tokenizer.chat_template.tool_use", "for tools")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_equals_the_original(byte_level: Tokenizer, byte_level_directory: Path, tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(write_bpe_gguf(tmp_path / "m.gguf", byte_level, byte_level_directory), min_vocab_size=512)
    for text in ("The quick brown fox", "It's 12 o'clock\n\n", "naïve 你好 😀<|im_end|>"):
        assert tokenizer.encode(text) == byte_level.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.chat_templates == {"default": "default one", "tool_use": "for tools"}
    assert (tokenizer.add_bos, tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (False, 512, 1, (2,))


def test_gguf_bos_flag_and_ids_that_are_added(byte_level: Tokenizer, byte_level_directory: Path, tmp_path: Path) -> None:
    path = write_bpe_gguf(tmp_path / "m.gguf", byte_level, byte_level_directory, add_bos_token=True, add_eos_token=True)
    tokenizer = load_gguf_tokenizer(path)
    assert tokenizer.add_bos
    assert tokenizer.encode("fox", add_special_tokens=True) == [1, *byte_level.encode("fox"), 2]
    assert tokenizer.encode("fox") == byte_level.encode("fox")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "brand-new"}, r"the pre-tokenizer 'brand-new' is not known .*--tokenizer"),
        ({"pre": None}, "names no pre-tokenizer"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"merges": None}, "merges: the file holds none"),
        ({"merges": ["nospace"]}, "merges: each must be two tokens"),
        ({"merges": ["zz qq"]}, "merges: don't fit the vocabulary"),
        ({"token_type": [1]}, "token_type: must hold one number"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], message: str, byte_level: Tokenizer, byte_level_directory: Path, tmp_path: Path) -> None:
    path = write_bpe_gguf(tmp_path / "m.gguf", byte_level, byte_level_directory, **changes)
    with pytest.raises(TokenizerError, match=message):
        load_gguf_tokenizer(path)


def pieces_of(name: str, text: str) -> list[str]:
    to_byte = byte_level_alphabet()
    return [bytes(to_byte[c] for c in piece).decode() for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 1234\n\nok", ["It", "'s", " 1234", "\n", "\n", "ok"]),
        ("smollm", "It's 12\n\nok", ["It", "'s", " ", "1", "2", "\n", "\n", "ok"]),
        ("llama-bpe", "IT'S 12345\n\n ok!", ["IT", "'S", " ", "123", "45", "\n\n", " ok", "!"]),
        ("qwen2", "IT'S 123\n\n ok!", ["IT", "'S", " ", "1", "2", "3", "\n\n", " ok", "!"]),
        ("deepseek-v3", "abc你好12345 x.y", ["abc", "你好", "123", "45", " x", ".y"]),
        ("deepseek-llm", "abc 12\n你好", ["abc", " ", "1", "2", "\n", "你好"]),
        ("deepseek-coder", "abc, 12", ["abc", ",", " ", "1", "2"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "CamelCase's 1234", ["Camel", "Case's", " ", "123", "4"]),
        ("default", "a.b 1234", ["a", ".", "b", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, expected: Sequence[str]) -> None:
    assert pieces_of(name, text) == list(expected)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    text = "It's 1234 o'clock,\r\n\n  naïve café — 你好，世界！ ｗｉｄｅ 😀👩‍🚀 _snake_ CamelCase\t$x=1;  "
    assert "".join(pieces_of(name, text)) == text


# tokenizer.json --------------------------------------------------------------------------------------


def test_hf_directory(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_token_id, byte_level.eos_token_ids) == (1, (2,))
    assert byte_level.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert byte_level.special_ids == {0, 1, 2, 3, 4}
    assert byte_level.chat_templates == {"default": "{{ bos_token }}{{ messages[0].content }}"}
    assert byte_level.token_id("<|im_end|>") == 4
    assert byte_level.token_id("no such token") is None


def llama_style(prepend: bool) -> tokenizers.Tokenizer:
    vocabulary = {"<unk>": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3, "▁": 4, "a": 5, "▁a": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prepend else []), normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


@pytest.mark.parametrize("prepend", [True, False])
def test_byte_fallback_tokenizer_json(prepend: bool, tmp_path: Path) -> None:
    backend = llama_style(prepend)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a a你")
    assert ids == backend.encode("a a你").ids
    assert tokenizer.decode(ids) == "a a你" == backend.decode(ids)
    assert tokenizer.pieces is not None
    assert tokenizer.pieces.strip_leading_space is prepend
    assert tokenizer.token_bytes(1) == b"\xe4"


def test_metaspace_decoder(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁", -3.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf_tokenizer(tmp_path)
    ids = tokenizer.encode("ab a b")
    assert tokenizer.decode(ids) == backend.decode(ids) == "ab a b"


def test_word_piece_has_no_pieces(word_piece: Tokenizer) -> None:
    assert word_piece.pieces is None
    ids = word_piece.encode("The quick fox")
    assert word_piece.decode(ids) == "The quick fox"
    assert word_piece.token_bytes(ids[0]) == b"The"


def test_chat_template_files_win(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_templates(tmp_path) == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_chat_templates(tmp_path)["default"] == "new"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(ModelFileError, match="chat_template: must be"):
        read_chat_templates(tmp_path)


# load_tokenizer --------------------------------------------------------------------------------------


def test_which_files_are_taken(byte_level_directory: Path, sentence_piece_file: Path) -> None:
    own = load_tokenizer(ModelConfig(model=str(byte_level_directory)), SPEC)
    assert own.eos_token_ids == (2, 4)
    assert own.vocab_size == 512
    other = load_tokenizer(ModelConfig(model="ignored", tokenizer=str(sentence_piece_file)), SPEC)
    assert other.token_id("▁hello") is not None
    file = load_tokenizer(ModelConfig(model="ignored", tokenizer=str(byte_level_directory / "tokenizer.json")), SPEC)
    assert file.encode("fox") == own.encode("fox")


def test_what_is_said_when_there_is_none(tmp_path: Path, sentence_piece_file: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "none")), SPEC)
    with pytest.raises(TokenizerError, match="holds no tokenizer files"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)), SPEC)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; try --tokenizer-backend transformers"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path), tokenizer_backend="tokenizers"), SPEC)
    with pytest.raises(TokenizerError, match="can't read a GGUF"):
        load_tokenizer(ModelConfig(tokenizer=str(sentence_piece_file), tokenizer_backend="transformers"), SPEC)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)), SPEC)


def test_a_missing_library_names_its_extra(byte_level_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library, extra in {"transformers": "transformers", "paddlenlp": "paddlenlp", "paddleformers": "paddlenlp"}.items():
        monkeypatch.setitem(__import__("sys").modules, library, None)
        config = ModelConfig(tokenizer=str(byte_level_directory), tokenizer_backend=library)  # type: ignore[arg-type]
        with pytest.raises(TokenizerError, match=rf"pip install .*'fastengine\[{extra}\]'"):
            load_tokenizer(config, SPEC)


def test_transformers_backend(byte_level: Tokenizer, byte_level_directory: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(byte_level_directory), tokenizer_backend="transformers"), SPEC)
    text = "The quick brown fox 你好 <|im_end|>"
    assert tokenizer.encode(text) == byte_level.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.bos_token_id == 1
