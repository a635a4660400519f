"""The interface between text and token ids, whatever library reads the tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from fastengine.text.token_pieces import TokenPieces


class TokenizerError(ValueError):
    """A tokenizer can't be loaded, or a text can't be tokenized; the message says what to do."""


class Tokenizer(ABC):
    """Text to token ids and back. Instances don't change after loading and may be used by several threads.

    ``pieces`` holds every token's exact bytes where the vocabulary has them, else None: then only
    whole decoding is exact and incremental decoding works on windows.
    ``special_tokens`` are the named ones (``bos_token``, ``eos_token``, ...) as templates see them.
    ``chat_templates`` maps a name (``default``, ``tool_use``, ...) to Jinja source; it may be empty.
    ``add_bos`` says whether a text with special tokens begins with ``bos_token_id``.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    add_bos: bool
    pieces: TokenPieces | None

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it become their ids. Raises TokenizerError."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """:meth:`encode` for many texts at once. Raises TokenizerError."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of ``token_ids``; broken UTF-8 becomes U+FFFD. Raises TokenizerError on an unknown id."""

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it (``Ġthe``, ``▁the``). Raises TokenizerError on an unknown id."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; without ``pieces`` its decoded text. Raises TokenizerError."""
        if self.pieces is None:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8")
        if not 0 <= token_id < len(self.pieces.bytes_of):
            raise unknown_token_id(token_id, self.vocab_size)
        return self.pieces.bytes_of[token_id]

    def fewest_tokens(self, text: str) -> int:
        """A count of tokens that ``text`` has at least, found without tokenizing it; 0 where nothing is known."""
        return 0

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template, with exactly one BOS in front if the model wants one."""
        return self.with_one_bos(self.encode(rendered))

    def with_one_bos(self, token_ids: list[int]) -> list[int]:
        """``token_ids`` of a rendered chat template with exactly one BOS in front if the model wants one (may be the same list)."""
        bos = self.bos_token_id
        if bos is None:
            return token_ids
        if self.add_bos and token_ids[:1] != [bos]:
            return [bos, *token_ids]
        while self.add_bos and token_ids[:2] == [bos, bos]:
            del token_ids[0]
        return token_ids


def unknown_token_id(token_id: int, vocab_size: int) -> TokenizerError:
    return TokenizerError(f"token id {token_id} is not in the vocabulary of {vocab_size} tokens")
