"""Token ids to text as they arrive: never half a character, never one twice, nothing of the prompt.

Whatever way the ids are split over calls, the pieces joined equal the decoding of all of them. Where
the prompt ends in half a character::

    prompt bytes ...  F0 9F | 98 80 'h' 'i'     the output's first bytes complete it: "😀hi"
    prompt bytes ...  F0 9F | 'h' 'i'           they don't: the half belongs to the prompt alone: "hi"
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from encodings import utf_8

from fastengine.text.token_pieces import TokenPieces
from fastengine.text.tokenizer import Tokenizer

REPLACEMENT = "�"
MAX_CHARACTER_BYTES = 4
# Tokens of the prompt that a decoder without exact pieces may need to see before the output.
CONTEXT_TOKENS = 6


class IncrementalDetokenizer(ABC):
    """Decodes one sequence. After :meth:`flush` nothing more may be fed."""

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """The text that became final with this token; often its own, ``""`` inside a character."""

    @abstractmethod
    def flush(self) -> str:
        """What was held back: U+FFFD for a character that was never completed."""


def make_detokenizer(tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """The detokenizer that is exact for this vocabulary, or the windowed one."""
    if tokenizer.pieces is None:
        return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
    return PieceDetokenizer(tokenizer.pieces, prompt_ids, tokenizer.special_ids if skip_special_tokens else frozenset())


class PieceDetokenizer(IncrementalDetokenizer):
    """Joins tokens' exact bytes through an incremental UTF-8 decoder: a fraction of a microsecond per token."""

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int] = (), skip: Collection[int] = frozenset()):
        self._bytes_of = pieces.bytes_of
        self._skip = skip
        self._decoder = utf_8.IncrementalDecoder("replace")
        self._decode = self._decoder.decode
        self._prompt_tail = _incomplete_tail(pieces.bytes_of, prompt_ids, skip)
        self._strip_space = pieces.strip_leading_space and not any(pieces.bytes_of[i] for i in prompt_ids if i not in skip)
        self._held = b""  # output bytes that wait until it is clear whether they complete the prompt's tail
        self._at_start = bool(self._prompt_tail) or self._strip_space

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        piece = self._bytes_of[token_id]
        if self._at_start:
            return self._start(piece)
        if piece.isascii() and not self._decoder.buffer:
            return piece.decode()  # as most are, in a third of the time
        return self._decode(piece)

    def flush(self) -> str:
        held, self._held = self._held, b""
        return self._decode(held, True)

    def _start(self, piece: bytes) -> str:
        """The first bytes of the output: they may complete the prompt's last character or carry a leading space."""
        self._held += piece
        if not self._held:
            return ""
        if self._prompt_tail:
            joined = (self._prompt_tail + self._held)[:MAX_CHARACTER_BYTES]
            state = _first_character(joined)
            if state == INCOMPLETE:
                return ""
            if state != BROKEN:
                self._held = self._prompt_tail + self._held
        held, self._held, self._at_start = self._held, b"", False
        return self._decode(held[1:] if self._strip_space and held[:1] == b" " else held)


class WindowDetokenizer(IncrementalDetokenizer):
    """For vocabularies whose tokens have no bytes of their own (WordPiece, other libraries).

    Decodes the last few tokens with and without the new one and takes the difference; a trailing
    U+FFFD is held back, for it may be half a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._known = len(self._ids)  # ids before this one are the context, whose text was emitted (or is the prompt's)
        self._context = self._text(self._ids)
        self._sent = 0  # characters past the context that were emitted already

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        stable = new.rstrip(REPLACEMENT) if new.endswith(REPLACEMENT) else new
        out = stable[self._sent :]
        if len(stable) == len(new) and new:
            self._ids = self._ids[self._known :]  # what was new is the next token's context
            self._known, self._sent = len(self._ids), 0
            self._context = self._text(self._ids)
        else:
            self._sent += len(out)
        return out

    def flush(self) -> str:
        return self._new_text()[self._sent :]

    def _new_text(self) -> str:
        text = self._text(self._ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        # The new tokens completed a character that the context ends in the middle of.
        return text[len(self._context.rstrip(REPLACEMENT)) :]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


INCOMPLETE, BROKEN, WHOLE = "incomplete", "broken", "whole"


def _first_character(data: bytes) -> str:
    """Whether ``data`` (at most four bytes) begins with a whole character, a part of one, or neither."""
    for length in range(1, len(data) + 1):
        try:
            _, consumed = codecs.utf_8_decode(data[:length], "strict", False)
        except UnicodeDecodeError:
            return BROKEN
        if consumed:
            return WHOLE
    return INCOMPLETE


def _incomplete_tail(bytes_of: Sequence[bytes], prompt_ids: Sequence[int], skip: Collection[int]) -> bytes:
    """The bytes of a character that the prompt begins but doesn't end, or ``b""``."""
    tail = b""
    for token_id in reversed(prompt_ids):
        if token_id not in skip:
            tail = bytes_of[token_id] + tail
        if len(tail) >= MAX_CHARACTER_BYTES:
            break
    tail = tail[-MAX_CHARACTER_BYTES:]
    _, consumed = codecs.utf_8_decode(tail, "replace", False)
    return tail[consumed:]
