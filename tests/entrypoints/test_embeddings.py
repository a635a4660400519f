"""/v1/embeddings: inputs, shapes and encodings, over an engine whose vectors are known."""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import msgspec
import numpy as np
import openai
import pytest

from fastengine.protocol.tokens import unpack_token_ids
from tests.frontend.harness import model_text

HIDDEN = 8


def vector_of(token_ids):
    return np.arange(1, HIDDEN + 1, dtype=np.float32) * len(token_ids)


@pytest.fixture(autouse=True)
def embeddings(api, monkeypatch):
    """The vector of a prompt is 1..8 times its length."""
    api.engine.generated.clear()

    def pooled(running):
        token_ids = unpack_token_ids(running.request.prompt_token_ids).tolist()
        data = vector_of(token_ids).tobytes() if running.request.sampling.pooling is not None else None
        return msgspec.structs.replace(plain(running), embedding=data)

    plain = api.engine._next
    monkeypatch.setattr(api.engine, "_next", pooled)


def embed(api, **body):
    reply = api.http.post("/v1/embeddings", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def unit(values):
    return (np.array(values) / np.linalg.norm(values)).tolist()


def test_one_text(api):
    reply = embed(api, input="abc", model="tiny")
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    (entry,) = reply["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    assert entry["embedding"] == pytest.approx(unit(range(1, 9)), abs=1e-6)
    sampling = api.engine.generated[0].sampling
    assert (sampling.pooling, sampling.max_tokens, sampling.ignore_eos) == ("mean", 1, True)


def test_the_sdk_gets_the_same_from_either_encoding(api):
    whole = api.sdk.embeddings.create(model="tiny", input=["a", "bcd"])  # asks for base64 itself
    floats = api.sdk.embeddings.create(model="tiny", input=["a", "bcd"], encoding_format="float")
    for got, expected in zip(whole.data, floats.data, strict=True):
        assert got.embedding == pytest.approx(expected.embedding, abs=1e-7)
    raw = embed(api, input="a", encoding_format="base64", normalize=False)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == list(range(1, 9))


def test_order_pooling_and_token_ids(api):
    reply = embed(api, input=[[1, 2], [3], [4, 5, 6]], pooling="last", normalize=False)
    assert [entry["embedding"][0] for entry in reply["data"]] == [2.0, 1.0, 3.0]
    assert {request.sampling.pooling for request in api.engine.generated} == {"last"}
    assert len(embed(api, input=[1, 2, 3])["data"]) == 1


def test_dimensions_are_cut_before_scaling(api):
    values = embed(api, input="abc", dimensions=3)["data"][0]["embedding"]
    assert values == pytest.approx(unit([1, 2, 3]), abs=1e-6)
    assert math.hypot(*values) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], [999]]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(api, body, field):
    reply = api.http.post("/v1/embeddings", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(field)


def test_a_model_without_hidden_states_is_an_error(api, monkeypatch):
    monkeypatch.setattr(api.engine, "_next", type(api.engine)._next.__get__(api.engine))
    with pytest.raises(openai.InternalServerError):
        api.sdk.embeddings.create(model="tiny", input="a")


@pytest.fixture(scope="module")
def null_server(shared_servers):
    def load():
        return replace(model_text(), has_logits=False)

    return shared_servers(load=load)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "input"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "text_2"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 2}, "prompt_logprobs"),
        ("/generate", {"text": "a", "return_logprob": True}, "return_logprob"),
    ],
)
def test_the_null_model_says_so(null_server, path, body, param):
    reply = null_server.http.post(path, json=body)
    assert reply.status_code == 400
    assert "null model" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == param
