"""Tokenizer over the ``tokenizers`` library: tokenizer.json files, and what other formats are turned into."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from fastengine.text.length_bound import length_bound
from fastengine.text.token_pieces import TokenPieces, pieces_from_decoder
from fastengine.text.tokenizer import Tokenizer, TokenizerError, unknown_token_id


class FastTokenizer(Tokenizer):
    """Wraps a ``tokenizers.Tokenizer``. ``pieces`` None means: derive them from the tokenizer's decoder."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        min_vocab_size: int = 0,
        pieces: TokenPieces | None = None,
        special_ids: Iterable[int] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_ids = frozenset(special_ids if special_ids is not None else (i for i, token in added.items() if token.special))
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.add_bos = bos_token_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_token_id]
        self.pieces = pieces if pieces is not None else _derived_pieces(backend, added.keys(), min_vocab_size)
        self._length_bound = length_bound(backend, self.pieces)
        self.vocab_size = len(self.pieces.bytes_of) if self.pieces else max(backend.get_vocab_size(), min_vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        try:
            # The variant without character offsets, which nothing here needs, is the faster one.
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError) as error:  # the library's complaint about a string with lone surrogates
            raise TokenizerError("the text holds half of a surrogate pair, which is no character") from error
        except Exception as error:  # the library knows no other class: an unknown token that is not in the vocabulary, for one
            raise TokenizerError(f"the tokenizer can't take this text: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skip = self.special_ids if skip_special_tokens else ()
        try:
            if self.pieces is not None and (not token_ids or min(token_ids) >= 0):
                return self.pieces.decode(token_ids, skip)
            return self.backend.decode([i for i in token_ids if i not in skip], skip_special_tokens=False)
        except (IndexError, OverflowError):
            unknown = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise unknown_token_id(unknown, self.vocab_size) from None

    def fewest_tokens(self, text: str) -> int:
        return 0 if self._length_bound is None else self._length_bound.fewest_tokens(text)

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise unknown_token_id(token_id, self.vocab_size)
        return self.backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)


def _derived_pieces(backend: tokenizers.Tokenizer, added: Iterable[int], min_vocab_size: int) -> TokenPieces | None:
    state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if state is None:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * max(max(vocabulary.values(), default=-1) + 1, min_vocab_size)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return pieces_from_decoder(state, tokens, set(added))
