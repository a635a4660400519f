"""/v1/completions"""

from __future__ import annotations

from typing import Any

import pytest

from tests.entrypoints.test_chat import chunks
from tests.frontend.harness import EOS, ApiServer, say


def complete(server: ApiServer, prompt: Any = "hi", **body: Any) -> Any:
    reply = server.http.post("/v1/completions", json={"prompt": prompt, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(autouse=True)
def answer(api):
    api.engine.script = say("Hello, wörld")
    api.engine.generated.clear()


def test_whole_and_streamed(api):
    reply = complete(api, model="default")
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "tiny"
    assert reply["choices"] == [{"index": 0, "text": "Hello, wörld", "logprobs": None, "finish_reason": "stop", "stop_reason": EOS}]
    parts = chunks(api, "/v1/completions", prompt="hi", stream_options={"include_usage": True})
    assert "".join(c["text"] for p in parts for c in p["choices"]) == "Hello, wörld"
    assert parts[-1]["usage"] == reply["usage"]


def test_sixteen_tokens_unless_asked_for_more(api):
    api.engine.script = say("x" * 100)
    assert complete(api)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("field", "prompt", "expected"),
    [
        ("prompt", "ab", ["ab"]),
        ("prompt", ["ab", "c"], ["ab", "c"]),
        ("prompt", [97, 98], ["ab"]),
        ("prompt", [[97], [98, 99]], ["a", "bc"]),
        ("prompt_token_ids", [97, 98], ["ab"]),
        ("prompt_token_ids", [[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_every_form_of_prompt(api, field, prompt, expected):
    api.engine.script = lambda request: say("to " + bytes(request.prompt_token_ids)[::4].decode())(request)
    reply = api.http.post("/v1/completions", json={field: prompt}).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(i, f"to {text}") for i, text in enumerate(expected)]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_several_prompts_with_n(api):
    api.engine.script = lambda request: say(f"{request.index}")(request)
    reply = complete(api, ["a", "bcd"], n=2, echo=True)
    assert [c["text"] for c in reply["choices"]] == ["a0", "a1", "bcd2", "bcd3"]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 8
    parts = chunks(api, "/v1/completions", prompt=["a", "bcd"], n=2, echo=True)
    got = [""] * 4
    for part in parts:
        for choice in part["choices"]:
            got[choice["index"]] += choice["text"]
    assert got == ["a0", "a1", "bcd2", "bcd3"]


def test_logprobs_have_one_entry_per_token(api):
    logprobs = complete(api, logprobs=2)["choices"][0]["logprobs"]
    tokens = ["H", "e", "l", "l", "o", ",", " ", "w", "bytes:\\xc3", "bytes:\\xb6", "r", "l", "d", "</s>"]
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [-0.25] * 14
    assert logprobs["top_logprobs"][0] == {"H": -0.25, "I": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12]
    parts = chunks(api, "/v1/completions", prompt="hi", logprobs=2)
    streamed = [c["logprobs"] for p in parts for c in p["choices"] if c["logprobs"]]
    for name, values in logprobs.items():
        assert [value for piece in streamed for value in piece[name]] == values
    assert complete(api, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_echo_with_logprobs_is_a_loglikelihood(api):
    """What evaluation harnesses send: the prompt's own log-probabilities, nothing generated."""
    reply = complete(api, "abc", echo=True, logprobs=1, max_tokens=0)
    choice = reply["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    choice = complete(api, [97, 98], echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "abHe"
    assert choice["logprobs"]["tokens"] == ["a", "b", "H", "e"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_ids_stand_on_the_choice(api):
    choice = complete(api, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(b"hi")
    assert choice["completion_token_ids"] == [*"Hello, wörld".encode(), EOS]
    parts = chunks(api, "/v1/completions", prompt="hi", return_token_ids=True)
    choices = [c for p in parts for c in p["choices"]]
    assert choices[0]["prompt_token_ids"] == list(b"hi")
    assert all("prompt_token_ids" not in c for c in choices[1:])
    assert [i for c in choices for i in c["completion_token_ids"]] == choice["completion_token_ids"]


def test_prompt_logprobs_stand_on_the_choice(api):
    rows = [c["prompt_logprobs"] for c in complete(api, ["ab", "c"], prompt_logprobs=0, max_tokens=1)["choices"]]
    assert [len(row) for row in rows] == [2, 1]
    assert rows[0][1] == {str(ord("b")): {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}


def test_the_sdk(api):
    answer = api.sdk.completions.create(model="tiny", prompt=["x", "y"], max_tokens=5, logprobs=2)
    assert [c.text for c in answer.choices] == ["Hello", "Hello"]
    parts = list(api.sdk.completions.create(model="tiny", prompt="x", stream=True))
    assert "".join(p.choices[0].text for p in parts) == "Hello, wörld"


def test_max_tokens_zero_returns_the_prompt_alone(api):
    for script in (say("x"), say("")):  # whatever the one token is that nobody sees
        api.engine.script = script
        reply = complete(api, prompt="abc", max_tokens=0, echo=True, logprobs=1)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", None)
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert reply["usage"]["completion_tokens"] == 0
        parts = chunks(api, "/v1/completions", prompt="abc", max_tokens=0, echo=True)
        assert "".join(c["text"] for p in parts for c in p["choices"]) == "abc"
        assert [c["finish_reason"] for p in parts for c in p["choices"] if c["finish_reason"]] == ["length"]


def test_what_lm_eval_sends_for_loglikelihoods(api):
    """Its ``local-completions`` model: batches of token ids, echoed with log-probabilities, one token generated."""
    prompts, context_lengths = [[97, 98, 99, 100], [101, 102, 103]], [2, 1]
    for max_tokens in (1, 0):
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
        reply = api.http.post("/v1/completions", json=body).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        for choice, prompt, length in zip(reply["choices"], prompts, context_lengths, strict=True):
            logprobs = choice["logprobs"]
            # The slice that lm-eval takes leaves the generated token out.
            values = logprobs["token_logprobs"][length : len(prompt)]
            tops = logprobs["top_logprobs"][length : len(prompt)]
            assert len(logprobs["token_logprobs"]) == len(prompt) + max_tokens
            assert values == [-0.25] * (len(prompt) - length)
            assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_best_of_returns_the_most_likely(api):
    """The fake engine gives every token the same log-probability: the first answers stay first."""
    api.engine.script = lambda request: say(f"answer {request.index}")(request)
    reply = complete(api, prompt=["a", "b"], best_of=3)
    assert [(c["index"], c["text"], c["logprobs"]) for c in reply["choices"]] == [(0, "answer 0", None), (1, "answer 3", None)]
    assert len(api.engine.generated) == 6
    assert reply["usage"]["completion_tokens"] == 6 * (len("answer 0") + 1)
    assert [c["text"] for c in complete(api, best_of=3, n=2, logprobs=1)["choices"]] == ["answer 0", "answer 1"]
    assert len(complete(api, best_of=2, n=2, stream=False)["choices"]) == 2


def test_numbers_with_a_fraction_of_zero_are_whole(api):
    body = {"prompt": [104.0, 105], "max_tokens": 3.0, "n": 1.0, "seed": 7.0, "top_k": -1.0, "logit_bias": {"5": 1.0}}
    reply = api.http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 3
    assert api.engine.generated[-1].sampling.max_tokens == 3


def test_top_p_0_is_taken(api):
    assert api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "top_p": 0}).status_code == 200
    assert api.engine.generated[-1].sampling.top_p == 0


def test_a_hopelessly_long_prompt_is_refused_by_its_length(api, monkeypatch):
    tokenizer = api.front.text.model.tokenizer
    monkeypatch.setattr(tokenizer, "fewest_tokens", len)
    batches = list(tokenizer.batches)
    for path, body, field in (
        ("/v1/completions", {"prompt": "a" * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ):
        reply = api.http.post(path, json=body)
        assert reply.status_code == 400
        assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (field, "context_length_exceeded")
        assert "4096" in reply.json()["error"]["message"]
    assert tokenizer.batches == batches


def test_unknown_fields_are_named_in_a_header(api):
    reply = api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "odd_field": 1})
    assert reply.status_code == 200
    assert "odd_field" in reply.headers["x-fastengine-warning"]


def test_a_stop_string_ends_the_sequence_in_the_engine_as_a_stop(api):
    api.engine.script = say("one two three four five six seven")
    api.engine.step_s = 0.005
    before = len(api.engine.aborts)
    reply = api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "stop": "three"})
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    api.engine.wait_for(lambda: len(api.engine.aborts) > before)
    assert api.engine.aborts[-1].reason == "stop"
    api.engine.step_s = 0.0
