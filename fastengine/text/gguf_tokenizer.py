"""Tokenizer from a GGUF file's metadata: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from fastengine.model_files.gguf_header import StringArray, read_gguf
from fastengine.text.fast_tokenizer import FastTokenizer
from fastengine.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from fastengine.text.token_pieces import METASPACE, TokenPieces, byte_level_pieces, metaspace_pieces
from fastengine.text.tokenizer import TokenizerError

PREFIX = "tokenizer.ggml."
# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(path: Path, *, eos_token_ids: Iterable[int] = (), min_vocab_size: int = 0) -> FastTokenizer:
    """Build the tokenizer a GGUF file describes. Raises ModelFileError or TokenizerError."""
    return _Builder(path, read_gguf(path).metadata).build(tuple(eos_token_ids), min_vocab_size)


class _Builder:
    """One file's vocabulary on its way to a FastTokenizer."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self._path = path
        self._metadata = metadata
        tokens = self._get("tokens")
        if not isinstance(tokens, StringArray) or not len(tokens):
            raise self._error("tokens: the file holds no vocabulary; give a tokenizer with --tokenizer")
        self._tokens = tokens.to_list()
        types = self._get("token_type")
        if types is not None and (not isinstance(types, np.ndarray) or len(types) != len(self._tokens)):
            raise self._error(f"token_type: must hold one number for each of the {len(self._tokens)} tokens")
        self._types = np.ones(len(self._tokens), np.int32) if types is None else types

    def build(self, eos_token_ids: tuple[int, ...], min_vocab_size: int) -> FastTokenizer:
        kinds: dict[str, Callable[[], tuple[tokenizers.Tokenizer, TokenPieces, bool]]] = {"gpt2": self._byte_level, "llama": self._sentence_piece}
        kind = self._get("model")
        if kind not in kinds:
            raise self._error(f"model: {kind!r} is not supported ({', '.join(kinds)} are); give a tokenizer with --tokenizer")
        backend, pieces, add_bos_default = kinds[kind]()
        backend.add_tokens([AddedToken(self._tokens[i], normalized=False, special=False) for i in self._ids(USER_DEFINED)])
        backend.add_special_tokens([AddedToken(self._tokens[i], normalized=False, special=True) for i in self._ids(CONTROL)])
        bos, eos = self._token_id("bos_token_id"), self._token_id("eos_token_id")
        self._set_post_processor(
            backend, bos if self._flag("add_bos_token", add_bos_default) else None, eos if self._flag("add_eos_token", False) else None
        )
        padding = max(0, min_vocab_size - len(self._tokens))
        return FastTokenizer(
            backend,
            bos_token_id=bos,
            eos_token_ids=(*eos_token_ids, *(() if eos is None else (eos,))),
            special_tokens=self._special_tokens(),
            chat_templates=self._chat_templates(),
            pieces=TokenPieces([*pieces.bytes_of, *[b""] * padding], pieces.strip_leading_space),
            special_ids=self._ids(CONTROL, UNKNOWN),
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, TokenPieces, bool]:
        name = self._get("pre")
        pre_tokenizer: PreTokenizer | None = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre_tokenizer is None:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            what = "the file names no pre-tokenizer" if name is None else f"the pre-tokenizer {name!r} is not known"
            raise self._error(f"pre: {what} ({known} are); give the original tokenizer.json with --tokenizer")
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        model = self._bpe(vocabulary, self._stored_merges(), ignore_merges=pre_tokenizer.ignore_merges)
        backend = tokenizers.Tokenizer(model)
        normalizer = pre_tokenizer.build_normalizer()
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = pre_tokenizer.build()
        backend.decoder = decoders.ByteLevel()
        pieces = TokenPieces(byte_level_pieces(self._tokens, self._ids(CONTROL, USER_DEFINED, UNKNOWN)))
        return backend, pieces, pre_tokenizer.add_bos

    def _sentence_piece(self) -> tuple[tokenizers.Tokenizer, TokenPieces, bool]:
        scores = self._get("scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self._tokens):
            raise self._error(f"scores: must hold one number for each of the {len(self._tokens)} tokens")
        unknown = self._token_id("unknown_token_id")
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        mergeable = set(self._ids(1))
        merges = merges_from_scores(self._tokens, scores.tolist(), vocabulary, mergeable)
        unk_token = None if unknown is None else self._tokens[unknown]
        backend = tokenizers.Tokenizer(self._bpe(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
        add_prefix = self._flag("add_space_prefix", True)
        steps: list[Any] = [normalizers.Prepend(METASPACE)] if add_prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", METASPACE)])
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if add_prefix else []
        backend.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        pieces = metaspace_pieces(self._tokens, self._ids(CONTROL, USER_DEFINED, UNKNOWN))
        return backend, TokenPieces(pieces, strip_leading_space=add_prefix), True

    def _stored_merges(self) -> list[tuple[str, str]]:
        merges = self._get("merges")
        if not isinstance(merges, StringArray):
            raise self._error("merges: the file holds none, and byte-level BPE can't do without")
        pairs = [merge.split(" ", 1) for merge in merges.to_list()]
        if any(len(pair) != 2 for pair in pairs):
            raise self._error("merges: each must be two tokens with a space between")
        return [(left, right) for left, right in pairs]

    def _bpe(self, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        try:
            return models.BPE(vocabulary, merges, **options)
        except Exception as error:
            raise self._error(f"merges: don't fit the vocabulary ({error})") from error

    def _set_post_processor(self, backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
        front = [] if bos is None else [("<bos>", bos)]
        back = [] if eos is None else [("<eos>", eos)]
        if front or back:
            template = [*(name for name, _ in front), "$A", *(name for name, _ in back)]
            backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*front, *back])

    def _chat_templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        named = {key[len(prefix) + 1 :]: value for key, value in self._metadata.items() if key.startswith(prefix + ".") and isinstance(value, str)}
        default = self._metadata.get(prefix)
        return {**named, **({"default": default} if isinstance(default, str) else {})}

    def _special_tokens(self) -> dict[str, str]:
        ids = {name: self._token_id(key) for name, key in NAMED_TOKENS.items()}
        return {name: self._tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def _ids(self, *types: int) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isin(self._types, types))]

    def _token_id(self, key: str) -> int | None:
        value = self._get(key)
        return value if isinstance(value, int) and 0 <= value < len(self._tokens) else None

    def _flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        return value if isinstance(value, bool) else default

    def _get(self, key: str) -> Any:
        return self._metadata.get(PREFIX + key)

    def _error(self, message: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: {PREFIX}{message}")


def merges_from_scores(tokens: list[str], scores: list[float], vocabulary: dict[str, int], mergeable: set[int]) -> list[tuple[str, str]]:
    """BPE merges that act like SentencePiece's: of all pairs that form a token, the best scored goes first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id in mergeable:
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left in mergeable and right in mergeable and left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left_text, right_text) for *_, left_text, right_text in ranked]
