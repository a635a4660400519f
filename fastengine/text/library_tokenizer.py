"""Tokenizers read by ``transformers``, ``paddleformers`` or ``paddlenlp``: what has no tokenizer.json.

None of them is needed to run fastengine; each is imported only when chosen or required. A tokenizer
that turns out to be a wrapped ``tokenizers.Tokenizer`` is unwrapped and used directly.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from fastengine.text.fast_tokenizer import FastTokenizer
from fastengine.text.hf_tokenizer import NAMED_TOKENS, read_chat_templates
from fastengine.text.tokenizer import Tokenizer, TokenizerError, unknown_token_id

Library = Literal["transformers", "paddleformers", "paddlenlp"]
MODULES: dict[Library, str] = {"transformers": "transformers", "paddleformers": "paddleformers.transformers", "paddlenlp": "paddlenlp.transformers"}
# What brings them: our extras have PaddleFormers, PaddleNLP's successor. PaddleNLP itself does with these older libraries, which
# exclude transformers 5: it wants an environment of its own.
PADDLENLP = "'paddlenlp==2.8.1' 'huggingface_hub==0.23.5' 'aistudio-sdk<0.3' 'pyarrow<21'"
PACKAGES: dict[Library, str] = {
    "transformers": "'fastengine[transformers]'",
    "paddleformers": "'fastengine[paddlenlp]'",
    "paddlenlp": f"{PADDLENLP} (or 'fastengine[paddlenlp]', and use the backend paddleformers)",
}


def load_library_tokenizer(library: Library, path: Path, *, eos_token_ids: Iterable[int] = (), min_vocab_size: int = 0) -> Tokenizer:
    """``AutoTokenizer.from_pretrained`` of ``library``, from local files only. Raises TokenizerError."""
    try:
        module = importlib.import_module(MODULES[library])
    except (ImportError, AttributeError) as error:  # beside libraries it was not written for, it asks modules for what they don't have
        raise TokenizerError(
            f"{path}: the tokenizer backend {library!r} is not usable here ({error}); install it with: pip install {PACKAGES[library]}"
        ) from error
    try:
        inner = module.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        hint = "" if (path / "tokenizer_config.json").is_file() else "; there is no tokenizer_config.json, which names its class"
        raise TokenizerError(f"{path}: {library} can't read a tokenizer here: {error}{hint}") from error
    fast = getattr(inner, "backend_tokenizer", None)
    templates = read_chat_templates(path) if path.is_dir() else {}
    if isinstance(fast, tokenizers.Tokenizer):
        return FastTokenizer(
            fast,
            bos_token_id=inner.bos_token_id,
            eos_token_ids=(*eos_token_ids, *_known(inner.eos_token_id)),
            special_tokens=_special_tokens(inner),
            chat_templates=templates,
            min_vocab_size=min_vocab_size,
        )
    return LibraryTokenizer(inner, eos_token_ids=eos_token_ids, chat_templates=templates, min_vocab_size=min_vocab_size)


class LibraryTokenizer(Tokenizer):
    """A tokenizer with the interface of ``transformers``' Python ones; it has no ``pieces``."""

    def __init__(self, inner: Any, *, eos_token_ids: Iterable[int], chat_templates: dict[str, str], min_vocab_size: int = 0):
        self._inner = inner
        self.vocab_size = max(len(inner), min_vocab_size)
        self.bos_token_id = inner.bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *_known(inner.eos_token_id))))
        self.special_ids = frozenset(inner.all_special_ids)
        self.special_tokens = _special_tokens(inner)
        self.chat_templates = chat_templates
        self.pieces = None
        self.add_bos = self.bos_token_id is not None and self.encode("a", add_special_tokens=True)[:1] == [self.bos_token_id]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            if add_special_tokens:
                return list(self._inner(text, add_special_tokens=True)["input_ids"])
            # In two steps, as PaddleFormers' own classes add special tokens even where they are told not to.
            return list(self._inner.convert_tokens_to_ids(self._inner.tokenize(text)))
        except UnicodeEncodeError as error:
            raise TokenizerError("the text holds half of a surrogate pair, which is no character") from error

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise unknown_token_id(token_id, self.vocab_size)
        # Ids between the library's vocabulary and the model's stand for nothing.
        known = [i for i in token_ids if i < len(self._inner)]
        return str(self._inner.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise unknown_token_id(token_id, self.vocab_size)
        return str(self._inner.convert_ids_to_tokens(token_id)) if token_id < len(self._inner) else ""

    def token_id(self, token: str) -> int | None:
        found = self._inner.convert_tokens_to_ids(token)
        # Unknown tokens give the id of the unknown token, or None.
        return None if found is None or self._inner.convert_ids_to_tokens(found) != token else int(found)


def _special_tokens(inner: Any) -> dict[str, str]:
    values = {name: getattr(inner, name, None) for name in NAMED_TOKENS}  # a library may lack some of the names
    return {name: str(value) for name, value in values.items() if value is not None}


def _known(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)
