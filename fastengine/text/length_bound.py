"""LengthBound: how few tokens a text can have, from its bytes and the longest token's.

A tokenizer that keeps every byte covers the text with its tokens' bytes, so that::

    number of tokens >= bytes of the text / bytes of the longest token

That holds only where nothing drops or shortens text before the vocabulary sees it: otherwise there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from fastengine.text.token_pieces import METASPACE, TokenPieces

# Steps that keep each byte or add some, and how many bytes at most become one.
NORMALIZERS = {"NFD": 1, "NFC": 4, "Prepend": 1}
PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})


@dataclass(frozen=True)
class LengthBound:
    """``longest``: bytes of text that one token stands for at most; ``dropped``: bytes that may vanish."""

    longest: int
    dropped: bytes
    metaspace: bool

    def fewest_tokens(self, text: str) -> int:
        if self.metaspace:
            text = text.replace(METASPACE, " ")
        data = text.encode("utf-8", "surrogatepass")
        if self.dropped:
            data = data.translate(None, self.dropped)
        return -(-len(data) // self.longest)


def length_bound(backend: tokenizers.Tokenizer, pieces: TokenPieces | None) -> LengthBound | None:
    """The bound for a tokenizer, None where there is none."""
    if pieces is None or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # a token that takes the white space beside it along may stand for any length
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        factor = 1 if _replaces_spaces(step) else NORMALIZERS.get(step["type"])
        if factor is None:
            return None
        shrinks *= factor
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in PRE_TOKENIZERS or step.get("behavior") == "Removed":
            return None
    longest = max(1, *map(len, pieces.bytes_of)) * shrinks
    single = {piece[0] for piece in pieces.bytes_of if len(piece) == 1}
    dropped = bytes(byte for byte in range(256) if byte not in single)
    return LengthBound(
        longest, dropped, pieces.strip_leading_space or any(_replaces_spaces(step) for step in _steps(backend.normalizer, "normalizers"))
    )


def _steps(part: Any, children: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as tokenizer.json describes them, sequences flattened."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), children)


def _flat(step: dict[str, Any], children: str) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for child in step[children]:
        yield from _flat(child, children)


def _replaces_spaces(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == METASPACE
