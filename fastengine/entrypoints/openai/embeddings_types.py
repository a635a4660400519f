"""Body and reply of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta

from fastengine.entrypoints.openai.request_types import CommonFields, Count, TokenId
from fastengine.protocol.requests import Pooling

MAX_INPUTS = 2048
InputText = Annotated[str, Meta(min_length=1)]


class EmbeddingsBody(CommonFields, kw_only=True):
    """POST /v1/embeddings"""

    input: Annotated[
        Annotated[str, Meta(min_length=1)] | Annotated[list[Union[InputText, TokenId, list[TokenId]]], Meta(min_length=1)],  # noqa: UP007
        Meta(description="Text, token ids, or a list of either."),
    ]
    encoding_format: Annotated[Literal["float", "base64"] | None, Meta(description="base64: of little-endian float32 values. Default float.")] = None
    dimensions: Annotated[Count | None, Meta(description="Keep this many of the first values. Default: all.")] = None
    pooling: Annotated[
        Pooling | None, Meta(description="Of the hidden states after the last norm: their mean over all tokens (default), or the last token's.")
    ] = None
    normalize: Annotated[bool | None, Meta(description="Scale to length 1. Default true.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin a text with the tokenizer's special tokens. Default true.")] = None


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
