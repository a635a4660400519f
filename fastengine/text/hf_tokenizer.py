"""Tokenizer from a directory in Hugging Face layout, or from a lone tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from fastengine.model_files.errors import ModelFileError
from fastengine.model_files.hf_config import read_json
from fastengine.text.fast_tokenizer import FastTokenizer
from fastengine.text.tokenizer import TokenizerError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATE_BYTES = 1 << 20


def load_hf_tokenizer(path: Path, *, eos_token_ids: Iterable[int] = (), min_vocab_size: int = 0) -> FastTokenizer:
    """``path`` is a directory with a tokenizer.json or that file. Raises TokenizerError or ModelFileError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    directory = file.parent
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise TokenizerError(f"{file}: is not a usable tokenizer.json ({error})") from error
    special_tokens = read_special_tokens(directory)
    bos = special_tokens.get("bos_token")
    eos = special_tokens.get("eos_token")
    eos_id = None if eos is None else backend.token_to_id(eos)
    return FastTokenizer(
        backend,
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=(*eos_token_ids, *(() if eos_id is None else (eos_id,))),
        special_tokens=special_tokens,
        chat_templates=read_chat_templates(directory),
        min_vocab_size=min_vocab_size,
    )


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json and special_tokens_map.json; the former wins."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = _json_or_empty(directory / name)
        for key in NAMED_TOKENS:
            value = config.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Chat templates by name, from tokenizer_config.json and the files beside it; files win."""
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        templates |= _templates_of(directory / name, _json_or_empty(directory / name).get("chat_template"))
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = read_template(file)
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_template(file)
    return templates


def read_template(path: Path) -> str:
    """A template's source from a file of at most 1 MiB of UTF-8. Raises ModelFileError."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ModelFileError(path, f"is {len(data)} bytes long; a chat template may have {MAX_TEMPLATE_BYTES}")
        return data.decode("utf-8")
    except OSError as error:
        raise ModelFileError(path, f"can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(path, f"is not UTF-8: {error}") from error


def _templates_of(path: Path, value: Any) -> dict[str, str]:
    """One template, or a list of ``{"name", "template"}``."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("name"), str) and isinstance(v.get("template"), str) for v in value):
        return {entry["name"]: entry["template"] for entry in value}
    raise ModelFileError(path, "chat_template: must be a template or a list of objects with name and template")


def _json_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
