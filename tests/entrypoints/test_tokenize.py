"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest

from tests.entrypoints.bodies import HI
from tests.frontend.harness import BOS, MAX_MODEL_LEN


def post(api, path, **body):
    reply = api.http.post(path, json=body)
    return reply.status_code, reply.json()


def test_a_prompt_there_and_back(api):
    status, reply = post(api, "/tokenize", prompt="wörld", return_token_strs=True)
    assert status == 200
    assert reply["tokens"] == list("wörld".encode())
    assert reply["count"] == 6
    assert reply["max_model_len"] == MAX_MODEL_LEN
    assert reply["token_strs"][0] == repr(b"w")
    assert post(api, "/detokenize", tokens=reply["tokens"]) == (200, {"prompt": "wörld"})


def test_a_chat_is_tokenized_as_the_chat_endpoint_does_it(api):
    _, reply = post(api, "/tokenize", messages=HI)
    assert "token_strs" not in reply
    sent = api.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True}).json()
    assert reply["tokens"] == sent["choices"][0]["message"]["prompt_token_ids"]
    without = post(api, "/tokenize", messages=HI, add_generation_prompt=False)[1]["tokens"]
    assert bytes(reply["tokens"]).decode() == bytes(without).decode() + "assistant:"


def test_a_prompt_longer_than_the_context_is_counted(api):
    assert post(api, "/tokenize", prompt="a" * (MAX_MODEL_LEN + 5))[1]["count"] == MAX_MODEL_LEN + 5


def test_special_tokens_are_shown_unless_told_otherwise(api):
    assert post(api, "/detokenize", tokens=[BOS, 104])[1] == {"prompt": "<s>h"}
    assert post(api, "/detokenize", tokens=[BOS, 104], skip_special_tokens=True)[1] == {"prompt": "h"}
    assert post(api, "/detokenize", tokens=[])[1] == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": HI, "tools": [{"type": "function"}]}, "tools[0]"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(api, path, body, field):
    status, reply = post(api, path, **body)
    assert status == 400
    assert reply["error"]["param"].startswith(field)


def test_an_unknown_model_is_a_404(api):
    assert post(api, "/tokenize", prompt="a", model="other")[0] == 404
