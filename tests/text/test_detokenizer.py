"""Incremental decoding equals whole decoding for any ids and any split, and shows nothing of the prompt."""

from __future__ import annotations

import codecs
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastengine.text.detokenizer import PieceDetokenizer, WindowDetokenizer, make_detokenizer
from fastengine.text.token_pieces import TokenPieces
from fastengine.text.tokenizer import Tokenizer
from tests.text.hard_texts import HARD_TEXTS

SHARED_FIXTURE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def streamed(tokenizer: Tokenizer, prompt_ids: list[int], output_ids: list[int], *, skip: bool = True) -> str:
    detokenizer = make_detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip)
    parts = [detokenizer.feed(token_id) for token_id in output_ids]
    return "".join(parts) + detokenizer.flush()


def decodes_to_one_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def half_character_at_the_end(data: bytes) -> bytes:
    for length in (3, 2, 1):
        tail = data[-length:]
        if (
            len(tail) == length
            and codecs.getincrementaldecoder("utf-8")("ignore").decode(tail) == ""
            and tail.decode("utf-8", "replace") == "�"
            and tail[0] >= 0xC2
        ):
            return tail
    return b""


def expected_text(prompt: bytes, output: bytes) -> str:
    """The rule, by trying: the prompt's half character shows if the output completes it, and not otherwise."""
    tail = half_character_at_the_end(prompt)
    completing = any(decodes_to_one_character(tail + output[:n]) for n in (1, 2, 3) if tail and n <= len(output))
    return (tail + output if completing else output).decode("utf-8", "replace")


def test_the_exact_detokenizer_is_chosen(exact_tokenizer: Tokenizer, word_piece: Tokenizer) -> None:
    assert isinstance(make_detokenizer(exact_tokenizer), PieceDetokenizer)
    assert isinstance(make_detokenizer(word_piece), WindowDetokenizer)


@SHARED_FIXTURE
@given(data=st.data(), skip=st.booleans())
def test_random_ids_equal_the_whole(exact_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, exact_tokenizer.vocab_size - 1), max_size=40))
    assert streamed(exact_tokenizer, [], ids, skip=skip) == exact_tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_tokens_in_any_order_equal_the_whole(exact_tokenizer: Tokenizer) -> None:
    """Single bytes are where characters break: valid, truncated, overlong and stray sequences."""
    assert exact_tokenizer.pieces is not None
    by_bytes = {piece: i for i, piece in enumerate(exact_tokenizer.pieces.bytes_of) if len(piece) == 1}
    generator = random.Random(7)
    alphabet = [
        by_bytes[bytes([value])]
        for value in (0x41, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xB8)
        if bytes([value]) in by_bytes
    ]
    assert len(alphabet) > 8
    for _ in range(2000):
        ids = generator.choices(alphabet, k=generator.randint(1, 10))
        assert streamed(exact_tokenizer, [], ids) == exact_tokenizer.decode(ids)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_every_split_of_real_text(exact_tokenizer: Tokenizer, text: str) -> None:
    ids = exact_tokenizer.encode(text + " and more")
    whole = exact_tokenizer.decode(ids, skip_special_tokens=False)
    if "<|" not in text:  # SentencePiece puts a space after a special token
        assert whole == text + " and more"
    data = [exact_tokenizer.token_bytes(token_id) for token_id in ids]
    assert streamed(exact_tokenizer, [], ids, skip=False) == whole
    for cut in range(1, len(ids) + 1):
        expected = expected_text(b"".join(data[:cut]), b"".join(data[cut:]))
        assert streamed(exact_tokenizer, ids[:cut], ids[cut:], skip=False) == expected


def test_no_half_character_is_ever_emitted(exact_tokenizer: Tokenizer) -> None:
    ids = exact_tokenizer.encode("你好 😀 naïve 🏳️‍🌈 नमस्ते")
    detokenizer = make_detokenizer(exact_tokenizer, exact_tokenizer.encode("x"))
    parts = [detokenizer.feed(token_id) for token_id in ids]
    assert "" in parts
    assert not any("�" in part for part in parts)
    assert detokenizer.flush() == ""


@pytest.fixture
def bytewise() -> TokenPieces:
    return TokenPieces([bytes([value]) for value in range(256)])


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("😀".encode()[:2], "😀".encode()[2:] + b"hi", "😀hi"),  # completed: the whole character
        ("😀".encode()[:2], b"hi", "hi"),  # not completed: the half is the prompt's
        ("😀".encode()[:2], b"", ""),
        ("😀".encode()[:1], "😀".encode()[1:2], "�"),  # the output's own half, alone
        ("😀".encode()[:1], "😀".encode()[1:2] + b"a", "�a"),
        (b"ab\xff", b"c", "c"),  # broken, but not half: nothing to complete
        ("�".encode()[:2], "�".encode()[2:], "�"),
        ("é".encode(), b"x", "x"),
    ],
)
def test_a_prompt_that_ends_in_half_a_character(bytewise: TokenPieces, prompt: bytes, output: bytes, expected: str) -> None:
    detokenizer = PieceDetokenizer(bytewise, list(prompt))
    assert "".join(detokenizer.feed(value) for value in output) + detokenizer.flush() == expected


BYTES = TokenPieces([bytes([value]) for value in range(256)])


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=3), st.integers(0, 4), st.binary(max_size=6), st.text(max_size=3))
def test_any_prompt_and_output_bytes(prompt_text: str, cut: int, noise: bytes, output_text: str) -> None:
    encoded = (prompt_text + output_text).encode()
    split = min(len(encoded), len(prompt_text.encode()) + cut)
    prompt, output = encoded[:split], encoded[split:] + noise
    detokenizer = PieceDetokenizer(BYTES, list(prompt))
    assert "".join(detokenizer.feed(value) for value in output) + detokenizer.flush() == expected_text(prompt, output)


def test_token_zero_is_a_token() -> None:
    pieces = TokenPieces([b"zero", b"one"])
    detokenizer = PieceDetokenizer(pieces, [0])
    assert [detokenizer.feed(0), detokenizer.feed(1), detokenizer.feed(0)] == ["zero", "one", "zero"]


def test_special_tokens(byte_level: Tokenizer) -> None:
    end = byte_level.token_id("<|im_end|>")
    assert end is not None
    ids = [*byte_level.encode("a"), end, *byte_level.encode("b")]
    assert streamed(byte_level, [], ids) == "ab"
    assert streamed(byte_level, [], ids, skip=False) == "a<|im_end|>b"


def test_the_leading_space_of_sentence_piece(sentence_piece: Tokenizer) -> None:
    hello = sentence_piece.encode("hello")
    assert sentence_piece.token_text(hello[0]) == "▁hello"
    assert streamed(sentence_piece, [], hello) == "hello"
    assert streamed(sentence_piece, [1], hello) == "hello"  # after a skipped BOS it is the text's start still
    assert streamed(sentence_piece, hello, hello) == " hello"


def test_window_detokenizer_on_real_text(word_piece: Tokenizer) -> None:
    ids = word_piece.encode("The quick brown fox jumps over the lazy dog")
    whole = word_piece.decode(ids)
    for cut in range(len(ids) + 1):
        assert word_piece.decode(ids[:cut]) + streamed(word_piece, ids[:cut], ids[cut:]) == whole


@SHARED_FIXTURE
@given(data=st.data())
def test_window_detokenizer_equals_the_whole_on_byte_level(byte_level: Tokenizer, data: st.DataObject) -> None:
    """On a vocabulary where both work, over text: the window must hold back half characters."""
    text = data.draw(st.text(max_size=12))
    ids = byte_level.encode(text)
    detokenizer = WindowDetokenizer(byte_level)
    parts = [detokenizer.feed(token_id) for token_id in ids]
    assert "".join(parts) + detokenizer.flush() == byte_level.decode(ids)
    if "�" not in text:
        assert not any("�" in part for part in parts)
