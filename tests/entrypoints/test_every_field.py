"""Whatever field of whatever endpoint has a value that can't be is refused by the name its caller knows it by."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fastengine.entrypoints import control_routes, tokenize_routes
from fastengine.entrypoints.anthropic.message_types import CountTokensBody, MessagesBody
from fastengine.entrypoints.openai.embeddings_types import EmbeddingsBody
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, CompletionRequest
from fastengine.entrypoints.openai.responses_types import ResponsesBody
from fastengine.entrypoints.score_types import RerankBody, ScoreBody
from fastengine.entrypoints.sglang.generate_types import GenerateBody
from tests.entrypoints.bodies import GENERATING, HI
from tests.entrypoints.field_walk import bad_fields
from tests.entrypoints.talk import text_with_parsers

ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, GENERATING["/v1/chat/completions"]),
    "/v1/completions": (CompletionRequest, GENERATING["/v1/completions"]),
    "/v1/responses": (ResponsesBody, GENERATING["/v1/responses"]),
    "/v1/messages": (MessagesBody, GENERATING["/v1/messages"]),
    "/v1/messages/count_tokens": (CountTokensBody, {"messages": HI}),
    "/generate": (GenerateBody, GENERATING["/generate"]),
    "/v1/embeddings": (EmbeddingsBody, GENERATING["/v1/embeddings"]),
    "/v1/score": (ScoreBody, GENERATING["/v1/score"]),
    "/v1/rerank": (RerankBody, GENERATING["/v1/rerank"]),
    "/tokenize": (tokenize_routes.TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (tokenize_routes.DetokenizeBody, {"tokens": [5]}),
}
CONTROL: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {route.path: (route.body, {}) for route in control_routes.ROUTES}


@pytest.fixture(scope="module")
def api(shared_servers):
    return shared_servers(load=text_with_parsers)


def complaint(api: Any, path: str, body: dict[str, Any], param: str) -> str | None:
    """What is wrong with the reply to ``body``, whose ``param`` is bad."""
    reply = api.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    if reply.status_code != 400:
        return f"{reply.status_code} {reply.text[:200]}"
    error = reply.json()["error"]
    if "param" in error and error["param"] != param:
        return f"param {error['param']!r}: {error['message'][:200]}"
    if not error["message"].startswith(param):
        return error["message"][:200]
    return None


@pytest.mark.parametrize("path", [*ROUTES, *CONTROL])
def test_bad_values_are_refused_by_the_fields_own_name(api, path):
    kind, base = (ROUTES | CONTROL)[path]
    found = []
    for bad in bad_fields(kind, base):
        wrong = complaint(api, path, bad.body, bad.param)
        if wrong is not None:
            found.append(f"{bad.param} = {str(bad.value)[:40]!r}: {wrong}")
    assert not found, "\n".join(found)


LONG = "a" * 5000
SPANNING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"max_output_tokens": 10**6}, "max_output_tokens"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ("/v1/messages", {"max_tokens": 10**6}, "max_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/generate", {"text": LONG}, "text"),
    ("/generate", {"text": ["a", LONG]}, "text[1]"),
    ("/generate", {"text": ["a", ""]}, "text[1]"),
    ("/generate", {"input_ids": [1]}, "input_ids"),
    ("/generate", {"text": None, "input_ids": [[1], [999]]}, "input_ids[1]"),
    ("/generate", {"sampling_params": {"max_new_tokens": 10**6}}, "sampling_params.max_new_tokens"),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": 10**6}]}, "sampling_params[1].max_new_tokens"),
    ("/generate", {"sampling_params": [{"min_new_tokens": 9, "max_new_tokens": 4}]}, "sampling_params[0].min_new_tokens"),
    ("/generate", {"sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
    ("/generate", {"sampling_params": {"logit_bias": {"999": 1}}}, "sampling_params.logit_bias"),
    ("/generate", {"sampling_params": {"regex": "["}}, "sampling_params.regex"),
    ("/generate", {"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ("/generate", {"sampling_params": {"ebnf": "root ::= "}}, "sampling_params.ebnf"),
    ("/generate", {"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    ("/generate", {"sampling_params": []}, "sampling_params"),
    ("/generate", {"return_logprob": []}, "return_logprob"),
    ("/generate", {"logprob_start_len": []}, "logprob_start_len"),
    ("/generate", {"top_logprobs_num": []}, "top_logprobs_num"),
    ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]"),
    ("/v1/embeddings", {"input": [[1, 999]]}, "input[0]"),
    ("/v1/embeddings", {"input": [1, 999]}, "input"),
    ("/v1/embeddings", {"dimensions": 10**6}, "dimensions"),
    ("/v1/score", {"text_1": LONG}, "text_1"),
    ("/v1/score", {"text_1": ["a", LONG], "text_2": ["b", "c"]}, "text_1[1]"),
    ("/v1/score", {"text_1": ["a", " "], "text_2": ["b", "c"]}, "text_1[1]"),
    ("/v1/score", {"text_2": LONG}, "text_2"),
    ("/v1/score", {"text_2": ["b", LONG]}, "text_2[1]"),
    ("/v1/score", {"text_1": None, "queries": LONG}, "queries"),
    ("/v1/score", {"text_1": None, "queries": ["a", "b", "c"], "text_2": ["a", "b"]}, "queries"),
    ("/v1/score", {"text_2": None, "documents": ["b", LONG]}, "documents[1]"),
    ("/v1/rerank", {"query": LONG}, "query"),
    ("/v1/rerank", {"documents": ["b", LONG]}, "documents[1]"),
    ("/v1/rerank", {"documents": ["b", {"text": LONG}]}, "documents[1].text"),
    ("/tokenize", {"prompt": None, "messages": HI, "chat_template": ""}, "chat_template"),
    ("/tokenize", {"prompt": None, "messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ("/detokenize", {"tokens": [999]}, "tokens"),
]


@pytest.mark.parametrize(("path", "change", "param"), SPANNING, ids=lambda value: str(value)[:60])
def test_what_spans_fields_or_asks_the_model_is_named_too(api, path, change, param):
    assert complaint(api, path, {**ROUTES[path][1], **change}, param) is None


def test_a_long_body_with_an_unusable_value_is_refused_without_a_search(api):
    body = json.dumps({"prompt": "x" * (1 << 20), "temperature": float("nan")})
    reply = api.http.post("/v1/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, None)
