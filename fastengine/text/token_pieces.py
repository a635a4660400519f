"""The exact bytes of every token, where a vocabulary has them: byte-level BPE and byte-fallback pieces.

With these, decoding is joining bytes: ``decode(ids) == b"".join(bytes_of[i] for i in ids)`` as UTF-8
with U+FFFD for what is broken. That makes incremental decoding exact and cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "▁"
# Not a byte-level character, so it separates tokens in one large string without ambiguity.
SEPARATOR = "\uffff"


@dataclass(frozen=True)
class TokenPieces:
    """``bytes_of[token_id]``; special tokens hold their own text. Ids without a token hold ``b""``.

    ``strip_leading_space``: a text's first space belongs to the tokenizer, not to the text.
    """

    bytes_of: Sequence[bytes]
    strip_leading_space: bool = False

    def decode(self, token_ids: Sequence[int], skip: Collection[int] = ()) -> str:
        """The whole text of ``token_ids`` without those in ``skip``. IndexError on an id past the vocabulary."""
        bytes_of = self.bytes_of
        text = b"".join([bytes_of[i] for i in token_ids if i not in skip]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_leading_space else text


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where printable in Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(hidden)}}


ALPHABET = byte_level_alphabet()
_TO_LATIN_1 = {ord(char): byte for char, byte in ALPHABET.items() if ord(char) != byte}


def byte_level_pieces(tokens: Sequence[str], raw: Collection[int] = ()) -> list[bytes]:
    """Bytes of byte-level tokens; the ids in ``raw`` (added tokens) are plain text instead."""
    # One translation of the whole vocabulary is several times faster than one per token.
    joined = SEPARATOR.join(tokens).translate(_TO_LATIN_1)
    out: list[bytes] = []
    for token_id, text in enumerate(joined.split(SEPARATOR)):
        try:
            out.append(text.encode("latin-1"))
        except UnicodeEncodeError:
            out.append(tokens[token_id].encode("utf-8", "replace"))
    if len(out) != len(tokens):  # a token holds the separator itself: translate one by one
        out = [_byte_level_piece(token) for token in tokens]
    for token_id in raw:
        out[token_id] = tokens[token_id].encode("utf-8", "replace")
    return out


def _byte_level_piece(token: str) -> bytes:
    values = [ALPHABET.get(char) for char in token]
    return token.encode("utf-8", "replace") if None in values else bytes(value for value in values if value is not None)


def metaspace_pieces(tokens: Sequence[str], raw: Collection[int] = (), *, byte_fallback: bool = True) -> list[bytes]:
    """Bytes of SentencePiece tokens: ``▁`` is a space and ``<0xE4>`` one byte; ``raw`` ids are plain text."""
    out = [token.replace(METASPACE, " ").encode("utf-8", "replace") for token in tokens]
    if byte_fallback:
        for token_id, token in enumerate(tokens):
            if len(token) == 6 and (match := BYTE_TOKEN.fullmatch(token)):
                out[token_id] = bytes([int(match[1], 16)])
    for token_id in raw:
        out[token_id] = tokens[token_id].encode("utf-8", "replace")
    return out


def pieces_from_decoder(decoder: dict[str, Any] | None, tokens: Sequence[str], added: Collection[int]) -> TokenPieces | None:
    """Pieces for a tokenizer.json whose ``decoder`` is one that joins bytes, else None."""
    steps = _flat_steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenPieces(byte_level_pieces(tokens, added))
    if kinds == ["Metaspace"] and steps[0].get("replacement") == METASPACE:
        prepends = steps[0].get("prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never") != "never"
        return TokenPieces(metaspace_pieces(tokens, added, byte_fallback=False), strip_leading_space=prepends)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_metaspace(steps[0]):
        if len(steps) == 3:
            return TokenPieces(metaspace_pieces(tokens, added))
        if len(steps) == 4 and _strips_one_leading_space(steps[3]):
            return TokenPieces(metaspace_pieces(tokens, added), strip_leading_space=True)
    return None


def _flat_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flat_steps(inner)]
    return [decoder]


def _replaces_metaspace(step: dict[str, Any]) -> bool:
    return step.get("content") == " " and json.dumps(step.get("pattern")) == json.dumps({"String": METASPACE})


def _strips_one_leading_space(step: dict[str, Any]) -> bool:
    return (step.get("type"), step.get("content"), step.get("start"), step.get("stop")) == ("Strip", " ", 1, 0)
