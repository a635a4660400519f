"""POST /v1/score and /v1/rerank: how likely the model finds a query after a document.

This is the query likelihood of language-model retrieval (Ponte and Croft 1998), with a large model as in
UPR (Sachan et al. 2022)::

    score(query, document) = exp(mean over the query's tokens of log p(token | document, tokens before it))

The query's tokens are the same behind every document, so scores of one query can be compared; those of
queries of different lengths or wordings can't.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastengine.entrypoints.arrival import Arrival, arrived
from fastengine.entrypoints.openai.generation import check_length, generate, item_names, now_s
from fastengine.entrypoints.openai.refused_fields import Refused, refused_by
from fastengine.entrypoints.responses import JsonReply, interrupted_by_disconnect
from fastengine.entrypoints.score_types import (
    Document,
    RerankBody,
    RerankReply,
    RerankResult,
    Score,
    ScoreBody,
    ScoreReply,
    ScoreUsage,
)
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.request_manager import SequenceInput
from fastengine.frontend.text_service import ModelText
from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.tokens import pack_token_ids

BEFORE_DOCUMENT, BEFORE_QUERY = "Document: ", "\nQuery:"
# Its one token is never looked at: what counts stands in the prompt.
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
# Field -> the values that ask for nothing, next to null.
OTHERS: Refused = {
    "activation": (),
    "apply_softmax": (False,),
    "label_token_ids": (),
    "max_tokens_per_doc": (),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
}
REFUSED_BY_SCORE, REFUSED_BY_RERANK = refused_by(ScoreBody, OTHERS), refused_by(RerankBody, OTHERS)


@dataclass(frozen=True)
class Text:
    """A query or a document, and what the caller calls it."""

    param: str
    text: str


@dataclass(frozen=True)
class Pair:
    """A document with the query behind it: the last ``num_query`` tokens."""

    token_ids: list[int]
    num_query: int


@dataclass
class Scores:
    values: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0


class ScoreRoutes:
    def __init__(self, front: FrontEnd):
        self._front = front

    async def score(self, request: Request) -> Response:
        new = await arrived(self._front, request, ScoreBody, REFUSED_BY_SCORE, "score")
        body = new.body
        queries = _texts("text_1", body.text_1, "queries", body.queries)
        documents = _texts("text_2", body.text_2, "documents", body.documents)
        if len(queries) not in (1, len(documents)):
            param = "text_1" if body.text_1 is not None else "queries"
            raise bad_request(param, f"{len(queries)} queries for {len(documents)} documents: send one, or as many as documents")
        queries *= len(documents) // len(queries)
        scores = await self._scores(request, new, queries, documents)
        reply = ScoreReply(
            id=new.request_id,
            created=now_s(),
            model=new.model,
            data=[Score(index=i, score=value) for i, value in enumerate(scores.values)],
            usage=ScoreUsage(prompt_tokens=scores.num_prompt_tokens, total_tokens=scores.num_prompt_tokens),
        )
        return JsonReply(reply, headers=new.headers)

    async def rerank(self, request: Request) -> Response:
        new = await arrived(self._front, request, RerankBody, REFUSED_BY_RERANK, "rerank")
        body = new.body
        documents = [
            Text(name, document) if isinstance(document, str) else Text(f"{name}.text", document.text)
            for name, document in zip(item_names("documents", body.documents), body.documents, strict=True)
        ]
        scores = await self._scores(request, new, [Text("query", body.query)] * len(documents), documents)
        results = [RerankResult(index=i, relevance_score=value) for i, value in enumerate(scores.values)]
        results.sort(key=lambda result: -result.relevance_score)
        del results[body.top_n or len(results) :]
        if body.return_documents is not False:
            for result in results:
                result.document = Document(text=documents[result.index].text)
        usage = ScoreUsage(prompt_tokens=scores.num_prompt_tokens, total_tokens=scores.num_prompt_tokens)
        reply = RerankReply(id=new.request_id, model=new.model, results=results, usage=usage)
        return JsonReply(reply, headers=new.headers)

    async def _scores(self, request: Request, new: Arrival[Any], queries: Sequence[Text], documents: Sequence[Text]) -> Scores:
        text = await self._front.text.ready()
        if not text.has_logits:
            raise bad_request(documents[0].param, "the null model has no log-probabilities")
        pairs = await self._pairs(queries, documents, text)
        sequences = [SequenceInput(pack_token_ids(pair.token_ids), SAMPLING) for pair in pairs]
        stream = generate(self._front.manager, new.request_id, sequences, new.body)
        scores = Scores([0.0] * len(pairs), sum(len(pair.token_ids) for pair in pairs))
        async with stream, interrupted_by_disconnect(request.receive, stream):
            while not stream.finished:
                for update in await stream.updates():
                    if update.error is not None:
                        raise ApiError.from_engine(update.error)
                    if update.prompt_logprobs is not None:
                        scores.values[update.index] = likelihood(update.prompt_logprobs, pairs[update.index].num_query)
                    elif update.finish_reason == "abort":
                        raise ApiError(503, "the request was aborted", retry_after_s=1.0)
        return scores

    async def _pairs(self, queries: Sequence[Text], documents: Sequence[Text], text: ModelText) -> list[Pair]:
        service = self._front.text
        for query in queries:
            if not query.text.strip():
                raise bad_request(query.param, "the text is empty")
        # Tokenized apart, so that a query is the same tokens whatever stands before it; once, where one is asked of all.
        distinct = list(dict.fromkeys(queries))
        encoded_queries = await asyncio.gather(*(service.encode(" " + query.text.strip(), "plain", param=query.param) for query in distinct))
        query_ids = {query: encoded.token_ids for query, encoded in zip(distinct, encoded_queries, strict=True)}
        for query, token_ids in query_ids.items():
            check_length(query.param, len(token_ids), 0, text.max_model_len)
        encoded_documents = await asyncio.gather(
            *(service.encode(BEFORE_DOCUMENT + document.text + BEFORE_QUERY, "special", param=document.param) for document in documents)
        )
        pairs = []
        for query, document, encoded in zip(queries, documents, encoded_documents, strict=True):
            token_ids = encoded.token_ids + query_ids[query]
            check_length(document.param, len(token_ids), 0, text.max_model_len)
            pairs.append(Pair(token_ids, len(query_ids[query])))
        return pairs


def likelihood(prompt_logprobs: Sequence[TopLogprobs | None], num_last: int) -> float:
    """The geometric mean of the last ``num_last`` prompt tokens' probabilities."""
    entries = prompt_logprobs[len(prompt_logprobs) - num_last :]
    return math.exp(sum(entry.logprob for entry in entries if entry is not None) / num_last)


def _texts(name: str, given: str | list[str] | None, other_name: str, other: str | list[str] | None) -> list[Text]:
    if given is not None and other is not None:
        raise bad_request(other_name, f"is another name of {name}: send one of them")
    param, chosen = (name, given) if given is not None else (other_name, other)
    if chosen is None:
        raise bad_request(name, "this field is required")
    texts = [chosen] if isinstance(chosen, str) else chosen
    return [Text(*named) for named in zip(item_names(param, chosen), texts, strict=True)]
