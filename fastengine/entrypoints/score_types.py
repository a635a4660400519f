"""Bodies and replies of ``/v1/score`` (vLLM's) and ``/v1/rerank`` (Jina's and Cohere's)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastengine.entrypoints.openai.request_types import CommonFields, Count

MAX_PAIRS = 1024
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_PAIRS)]


class ScoreBody(CommonFields, kw_only=True):
    """POST /v1/score. One ``text_1`` for all of ``text_2``, or as many of each."""

    text_1: Annotated[str | Texts | None, Meta(description="The query or queries.")] = None
    text_2: Annotated[str | Texts | None, Meta(description="The document or documents.")] = None
    queries: Annotated[str | Texts | None, Meta(description="Another name of text_1.")] = None
    documents: Annotated[str | Texts | None, Meta(description="Another name of text_2.")] = None


class ScoreUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Score(msgspec.Struct, kw_only=True):
    """``score`` is the likelihood per token of text_1 after text_2, in [0, 1]; see docs/scoring.md."""

    index: int
    object: str = "score"
    score: float


class ScoreReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Document(msgspec.Struct, kw_only=True):
    text: str


class RerankBody(CommonFields, kw_only=True):
    """POST /v1/rerank"""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_PAIRS)]
    top_n: Annotated[Count | None, Meta(description="Return the best of them only. Default: all.")] = None
    return_documents: Annotated[bool | None, Meta(description="Repeat the documents in the results. Default true.")] = None


class RerankResult(msgspec.Struct, kw_only=True):
    """``relevance_score`` is the likelihood per token of the query after the document, in [0, 1]; see docs/scoring.md."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    """``results`` are in order, the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: ScoreUsage
