"""No text may ever have fewer tokens than the bound says, whatever the tokenizer does to it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from fastengine.text.fast_tokenizer import FastTokenizer
from fastengine.text.hf_tokenizer import load_hf_tokenizer
from fastengine.text.length_bound import length_bound
from fastengine.text.tokenizer import Tokenizer
from tests.text.hard_texts import HARD_TEXTS

# Runs of one thing are what long tokens are made of.
TEXTS = st.lists(st.tuples(st.text(max_size=4), st.integers(1, 80)).map(lambda run: run[0] * run[1]), max_size=6).map("".join)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=TEXTS | st.sampled_from(HARD_TEXTS))
def test_a_text_has_at_least_as_many_tokens(exact_tokenizer: Tokenizer, text: str) -> None:
    assert exact_tokenizer.fewest_tokens(text) <= len(exact_tokenizer.encode(text))


def test_megabytes_are_known_not_to_fit(exact_tokenizer: Tokenizer) -> None:
    assert exact_tokenizer.fewest_tokens("a" * 10_000_000) > 10_000
    assert exact_tokenizer.fewest_tokens("") == 0


def test_there_is_no_bound_without_exact_bytes(word_piece: Tokenizer) -> None:
    assert word_piece.fewest_tokens("a" * 10_000_000) == 0


@pytest.mark.parametrize(
    ("change", "bounded"),
    [
        (lambda backend: setattr(backend, "normalizer", normalizers.NFC()), True),
        (lambda backend: setattr(backend, "normalizer", normalizers.Strip()), False),
        (lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), False),
        (lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")), False),
        (lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()), False),
        (lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")), False),
        (lambda backend: backend.add_special_tokens([AddedToken("<|x|>", rstrip=True, special=True)]), False),
    ],
)
def test_what_drops_text_takes_the_bound_away(byte_level_directory, change, bounded) -> None:
    tokenizer = load_hf_tokenizer(byte_level_directory)
    assert isinstance(tokenizer, FastTokenizer)
    change(tokenizer.backend)
    bound = length_bound(tokenizer.backend, tokenizer.pieces)
    assert (bound is not None) is bounded
    if bound is not None:
        for text in ("e\u0301" * 100, "\u1112\u1161\u11ab" * 100, "\u03b1\u0313\u0300\u0345" * 100):
            assert bound.fewest_tokens(text) <= len(tokenizer.encode(text))
