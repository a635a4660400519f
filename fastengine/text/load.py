"""Which files and which library make a model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from fastengine.config import ModelConfig
from fastengine.model_files import ModelSpec, is_gguf, resolve_model
from fastengine.text.gguf_tokenizer import load_gguf_tokenizer
from fastengine.text.hf_tokenizer import load_hf_tokenizer
from fastengine.text.library_tokenizer import load_library_tokenizer
from fastengine.text.tokenizer import Tokenizer, TokenizerError


def load_tokenizer(config: ModelConfig, spec: ModelSpec) -> Tokenizer:
    """The tokenizer of ``--tokenizer`` or the model's own, read by ``--tokenizer-backend``.

    ``auto`` takes a GGUF's own vocabulary or tokenizer.json, and asks ``transformers`` for the rest.
    Its ``eos_token_ids`` are the spec's and the tokenizer's. Raises TokenizerError or ModelFileError.
    """
    path = Path(config.tokenizer).expanduser() if config.tokenizer else resolve_model(config.model)
    if not path.exists():
        raise TokenizerError(f"{path}: no such file or directory (--tokenizer)")
    eos, size, backend = spec.eos_token_ids, spec.vocab_size, config.tokenizer_backend
    if path.is_dir() and not (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        path = ggufs[0] if len(ggufs) == 1 else path
    if path.is_file() and is_gguf(path):
        if backend not in ("auto", "tokenizers"):
            raise TokenizerError(f"{path}: --tokenizer-backend {backend} can't read a GGUF's vocabulary; leave it at auto, or give --tokenizer DIR")
        return load_gguf_tokenizer(path, eos_token_ids=eos, min_vocab_size=size)
    has_json = path.is_file() or (path / "tokenizer.json").is_file()
    if backend == "tokenizers" or (backend == "auto" and has_json):
        if not has_json:
            raise TokenizerError(f"{path}: holds no tokenizer.json; try --tokenizer-backend transformers")
        return load_hf_tokenizer(path, eos_token_ids=eos, min_vocab_size=size)
    if backend == "auto" and not any(path.glob("*token*")) and not any(path.glob("*.model")):
        raise TokenizerError(f"{path}: holds no tokenizer files; give some with --tokenizer")
    return load_library_tokenizer("transformers" if backend == "auto" else backend, path, eos_token_ids=eos, min_vocab_size=size)
