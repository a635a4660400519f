"""LibraryTokenizer over a stand-in with the interface of the libraries' Python tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastengine.text.detokenizer import make_detokenizer
from fastengine.text.library_tokenizer import LibraryTokenizer, load_library_tokenizer
from fastengine.text.tokenizer import TokenizerError


class ByteTokenizer:
    """Ids 0..2 are unk, bos and eos; every UTF-8 byte b is 3 + b."""

    bos_token, eos_token, unk_token = "<s>", "</s>", "<unk>"
    bos_token_id, eos_token_id = 1, 2
    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return 259

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1, *self.convert_tokens_to_ids(self.tokenize(text))]}  # whatever it is told, as PaddleFormers' do

    def tokenize(self, text: str) -> list[str]:
        return [f"byte {byte}" for byte in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        special = b"" if skip_special_tokens else b"<special>"
        return b"".join(bytes([i - 3]) if i >= 3 else special for i in token_ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return ("<unk>", "<s>", "</s>")[token_id] if token_id < 3 else f"byte {token_id - 3}"

    def convert_tokens_to_ids(self, token: Any) -> Any:
        if isinstance(token, list):
            return [self.convert_tokens_to_ids(one) for one in token]
        return {"<s>": 1, "</s>": 2}.get(token, int(token[5:]) + 3 if token.startswith("byte ") else 0)


@pytest.fixture
def tokenizer() -> LibraryTokenizer:
    inner: Any = ByteTokenizer()
    return LibraryTokenizer(inner, eos_token_ids=(7,), chat_templates={}, min_vocab_size=300)


def test_the_interface(tokenizer: LibraryTokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos) == (300, 1, (7, 2), True)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ids = tokenizer.encode("é😀", add_special_tokens=True)
    assert tokenizer.decode(ids) == "é😀"
    assert tokenizer.decode([299]) == ""
    assert tokenizer.encode("é😀") == tokenizer.encode_chat("é😀")[1:] == ids[1:]
    assert tokenizer.encode_batch(["a", "b"]) == [[3 + ord("a")], [3 + ord("b")]]
    assert tokenizer.token_text(1) == "<s>"
    assert tokenizer.token_id("</s>") == 2
    assert tokenizer.token_id("nothing") is None
    assert tokenizer.token_bytes(3 + ord("a")) == b"a"
    with pytest.raises(TokenizerError, match="not in the vocabulary"):
        tokenizer.decode([300])
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_streaming_holds_half_characters_back(tokenizer: LibraryTokenizer) -> None:
    text = "a é 你 😀 end"
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        detokenizer = make_detokenizer(tokenizer, ids[:cut])
        parts = [detokenizer.feed(token_id) for token_id in ids[cut:]]
        assert not any("�" in part for part in parts)
        before = tokenizer.decode(ids[:cut]).rstrip("�")
        assert before + "".join(parts) + detokenizer.flush() == text


def test_paddlenlps_own_tokenizer(tmp_path: Path) -> None:
    """Where PaddleNLP is: it excludes libraries that other tests need, so that it has an environment of its own."""
    pytest.importorskip("paddlenlp.transformers", exc_type=ImportError)
    import sentencepiece

    (tmp_path / "text").write_text("Count from 1 to 20.\nThe capital of France is Paris.\n" * 50)
    # The name that its Llama tokenizer looks for.
    name = tmp_path / "sentencepiece.bpe"
    options = {"model_type": "bpe", "byte_fallback": True, "unk_id": 0, "bos_id": 1, "eos_id": 2, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(name), vocab_size=320, **options)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}"}))
    tokenizer = load_library_tokenizer("paddlenlp", tmp_path, min_vocab_size=400)
    reference = sentencepiece.SentencePieceProcessor(model_file=f"{name}.model")
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos) == (400, 1, (2,), True)
    assert tokenizer.chat_templates == {"default": "{{ messages[0].content }}"}
    for text in ("The capital of France is Paris.", "é 你 😀", "a"):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
        assert tokenizer.decode(ids) == text
        detokenizer = make_detokenizer(tokenizer, [])
        assert "".join([detokenizer.feed(token_id) for token_id in ids]) + detokenizer.flush() == text


def test_a_library_beside_others_that_it_was_not_written_for_is_told_apart_from_a_broken_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(name: str) -> None:
        raise AttributeError("module 'pyarrow' has no attribute 'PyExtensionType'")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(TokenizerError, match=r"PyExtensionType.*pip install 'paddlenlp==2.8.1' 'huggingface_hub==0.23.5'.*or 'fastengine"):
        load_library_tokenizer("paddlenlp", tmp_path)
