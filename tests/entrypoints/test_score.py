"""/v1/score and /v1/rerank: what is asked of the engine, and what its log-probabilities become."""

from __future__ import annotations

import math

import pytest

from fastengine.protocol.tokens import unpack_token_ids
from tests.frontend import fake_engine

DOCUMENTS = ["aaaa", "bbbb", "cccc"]


@pytest.fixture(autouse=True)
def likelihoods(api, monkeypatch):
    """The engine finds a token the likelier the more of it the prompt has: here, by the document's first letter."""
    api.engine.generated.clear()

    def logprobs(running):
        output = plain(running)
        prompt = bytes(unpack_token_ids(running.request.prompt_token_ids).tolist()).decode()
        value = {"a": -3.0, "b": -1.0, "c": -2.0}[prompt.removeprefix("Document: ")[0]]
        entries = [fake_engine.TopLogprobs(value if i >= prompt.index("Query:") + len("Query:") else -99.0, 1) for i in range(1, len(prompt))]
        return fake_engine.msgspec.structs.replace(output, prompt_logprobs=[None, *entries])

    plain = api.engine._next
    monkeypatch.setattr(api.engine, "_next", logprobs)


def post(api, path, **body):
    reply = api.http.post(path, json=body)
    return reply.status_code, reply.json()


def test_scores_are_likelihoods_per_token_of_the_query(api):
    status, reply = post(api, "/v1/score", text_1="who?", text_2=DOCUMENTS)
    assert status == 200
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    assert [entry["score"] for entry in reply["data"]] == pytest.approx([math.exp(-3), math.exp(-1), math.exp(-2)])
    assert reply["object"] == "list"
    assert reply["usage"]["prompt_tokens"] == 3 * len("Document: aaaa\nQuery: who?")
    assert len(api.engine.generated) == 3
    prompt = bytes(unpack_token_ids(api.engine.generated[0].prompt_token_ids).tolist()).decode()
    assert prompt == "Document: aaaa\nQuery: who?"
    sampling = api.engine.generated[0].sampling
    assert (sampling.max_tokens, sampling.prompt_logprobs) == (1, 0)


def test_pairs_in_order(api):
    _, reply = post(api, "/score", queries=["one", "two"], documents=["c", "a"])
    assert [entry["score"] for entry in reply["data"]] == pytest.approx([math.exp(-2), math.exp(-3)])
    prompts = [bytes(unpack_token_ids(r.prompt_token_ids).tolist()).decode() for r in api.engine.generated]
    assert prompts == ["Document: c\nQuery: one", "Document: a\nQuery: two"]


def test_reranking_puts_the_best_first(api):
    status, reply = post(api, "/v1/rerank", model="tiny", query="who?", documents=[*DOCUMENTS[:2], {"text": "cccc"}])
    assert status == 200
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    assert [result["document"]["text"] for result in reply["results"]] == ["bbbb", "cccc", "aaaa"]
    scores = [result["relevance_score"] for result in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    _, reply = post(api, "/rerank", query="who?", documents=DOCUMENTS, top_n=1, return_documents=False)
    assert [set(result) for result in reply["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": " ", "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "a", "queries": "a"}, "queries"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 1025}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", "b" * 5000]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "label_token_ids": [1]}, "label_token_ids"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(api, path, body, field):
    status, reply = post(api, path, **body)
    assert status == 400
    assert reply["error"]["param"].startswith(field)
