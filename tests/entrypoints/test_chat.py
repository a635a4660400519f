"""/v1/chat/completions: what a client gets, whole and streamed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from fastengine.protocol.outputs import TopLogprobs
from tests.entrypoints.bodies import HI
from tests.frontend.harness import EOS, ApiServer, say

PROMPT = "user:hi\nassistant:"


def chat(server: ApiServer, **body: Any) -> Any:
    reply = server.http.post("/v1/chat/completions", json={"messages": HI, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(server: ApiServer, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    reply = server.http.post(path, json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def texts(parts: list[Any], n: int = 1) -> list[str]:
    out = [""] * n
    for part in parts:
        for choice in part["choices"]:
            out[choice["index"]] += choice["delta"].get("content", "")
    return out


@pytest.fixture(autouse=True)
def answer(api):
    api.engine.script = say("Hello, wörld 🌞!")
    api.engine.generated.clear()


def test_whole_answer(api):
    reply = chat(api, model="tiny", max_tokens=100)
    choice = reply["choices"][0]
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    assert reply["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld 🌞!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == EOS
    assert choice["logprobs"] is None
    # The end-of-sequence token is counted though it has no text.
    tokens = len("Hello, wörld 🌞!".encode()) + 1
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": tokens, "total_tokens": len(PROMPT) + tokens}
    assert reply["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": len(PROMPT) // 2}, "weight_version": "v1"}


def test_the_stream_says_the_same(api):
    parts = chunks(api, messages=HI, stream_options={"include_usage": True})
    assert texts(parts) == ["Hello, wörld 🌞!"]
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(part["object"] == "chat.completion.chunk" and part["usage"] is None for part in parts[:-1])
    assert [c["finish_reason"] for p in parts for c in p["choices"] if c["finish_reason"]] == ["stop"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == chat(api)["usage"]
    assert len({part["id"] for part in parts}) == 1


def test_without_include_usage_no_chunk_has_usage(api):
    assert not any("usage" in part for part in chunks(api, messages=HI))


def test_continuous_usage_grows_to_the_total(api):
    counts = [p["usage"]["completion_tokens"] for p in chunks(api, messages=HI, stream_options={"continuous_usage_stats": True})]
    assert counts == sorted(counts)
    assert counts[-1] == chat(api)["usage"]["completion_tokens"]


def test_length_is_the_reason_at_max_tokens(api):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = chat(api, **{name: 5})
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["message"]["content"] == "Hello"
    assert chat(api, max_tokens=2, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    assert texts(chunks(api, messages=HI, max_tokens=1)) == ["H"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_abort_in_the_engine(api, stream):
    api.engine.aborts.clear()
    body = {"stop": ["zzz", ", wö"], "ignore_eos": True, "messages": HI}  # without the stop string it would never end
    api.engine.script = lambda request: itertools.cycle("Hello, wörld ".encode())
    if stream:
        parts = chunks(api, **body)
        text, choice = texts(parts)[0], parts[-1]["choices"][0]
    else:
        choice = chat(api, **body)["choices"][0]
        text = choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("Hello", "stop", ", wö")
    api.engine.wait_for(lambda: api.engine.num_running == 0)
    assert len(api.engine.aborts) == 1


def test_tokens_after_a_stop_string_are_not_counted(api):
    """They arrive merged into one update when the engine is faster than the reader."""
    reply = chat(api, stop="ll", return_token_ids=True, logprobs=True)
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["choices"][0]["message"]["completion_token_ids"] == list(b"Hell")
    assert len(reply["choices"][0]["logprobs"]["content"]) == 4
    assert chat(api, stop="ll", include_stop_str_in_output=True)["choices"][0]["message"]["content"] == "Hell"


def test_stop_token_ids_end_without_the_token(api):
    choice = chat(api, stop_token_ids=[ord("w")], return_token_ids=True)["choices"][0]
    assert choice["message"]["content"] == "Hello, "
    assert choice["stop_reason"] == ord("w")
    assert choice["message"]["completion_token_ids"] == list(b"Hello, w")


def test_token_ids_come_back_where_asked_for(api):
    message = chat(api, return_token_ids=True)["choices"][0]["message"]
    assert bytes(message["prompt_token_ids"]).decode() == PROMPT
    assert message["completion_token_ids"] == [*"Hello, wörld 🌞!".encode(), EOS]
    parts = chunks(api, messages=HI, return_token_ids=True)
    assert bytes(parts[0]["choices"][0]["delta"]["prompt_token_ids"]).decode() == PROMPT
    ids = [i for part in parts for c in part["choices"] for i in c["delta"].get("completion_token_ids", [])]
    assert ids == message["completion_token_ids"]
    assert not any("prompt_token_ids" in c["delta"] for part in parts[1:] for c in part["choices"])


def test_logprobs_belong_to_the_tokens(api):
    content = chat(api, logprobs=True, top_logprobs=2, max_tokens=7)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello, "
    assert content[0] == {
        "token": "H",
        "logprob": -0.25,
        "bytes": [72],
        "top_logprobs": [{"token": "H", "logprob": -0.25, "bytes": [72]}, {"token": "I", "logprob": -0.5, "bytes": [73]}],
    }
    streamed = [
        e
        for p in chunks(api, messages=HI, logprobs=True, top_logprobs=2, max_tokens=7)
        for c in p["choices"]
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert streamed == content
    assert chat(api, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_bytes_of_half_characters_join_to_the_text(api):
    content = chat(api, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "Hello, wörld 🌞!"


def test_prompt_logprobs(api):
    reply = chat(api, prompt_logprobs=1, max_tokens=1)
    assert len(reply["prompt_logprobs"]) == len(PROMPT)
    assert reply["prompt_logprobs"][0] is None
    assert reply["prompt_logprobs"][1] == {str(ord("s")): {"logprob": -0.25, "rank": 1, "decoded_token": "s"}}


def test_n_answers_share_the_prompt(api):
    api.engine.script = lambda request: say(f"answer {request.index}")(request)
    reply = chat(api, n=3, request_id="three", seed=7)
    assert [c["message"]["content"] for c in reply["choices"]] == ["answer 0", "answer 1", "answer 2"]
    assert reply["id"] == "three"
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    sent = api.engine.generated
    assert [r.request_id for r in sent] == ["three#0", "three#1", "three#2"]
    assert {r.parent_id for r in sent} == {"three"}
    seeds = [r.sampling.seed for r in sent]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    chat(api, n=3, seed=7)
    assert [r.sampling.seed for r in api.engine.generated[3:]] == seeds
    parts = chunks(api, messages=HI, n=3)
    assert texts(parts, 3) == ["answer 0", "answer 1", "answer 2"]
    assert sorted(c["index"] for p in parts for c in p["choices"] if c["delta"].get("role")) == [0, 1, 2]


def test_content_parts_are_joined(api):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    chat(api, messages=messages)
    assert (
        bytes(chat(api, messages=messages, return_token_ids=True)["choices"][0]["message"]["prompt_token_ids"]).decode() == "user:one two\nassistant:"
    )


def test_prompt_token_ids_stand_in_for_messages(api):
    reply = api.http.post("/v1/chat/completions", json={"prompt_token_ids": [5, 6, 0], "return_token_ids": True})
    assert reply.json()["choices"][0]["message"]["prompt_token_ids"] == [5, 6, 0]


def test_template_variables_and_templates_of_the_request(api):
    template = "{{ who }}|{{ enable_thinking }}|{{ messages[0].content }}"
    # A template may call its variables as it likes.
    names = {"who": "me", "self": 1, "source": 2, "template": 3, "variables": 4}
    body = {"chat_template": template, "chat_template_kwargs": names, "enable_thinking": False, "return_token_ids": True}
    assert bytes(chat(api, **body)["choices"][0]["message"]["prompt_token_ids"]).decode() == "me|False|hi"


def test_continue_final_message_and_echo(api):
    messages = [*HI, {"role": "assistant", "content": "It be"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    message = chat(api, **body)["choices"][0]["message"]
    assert bytes(message["prompt_token_ids"]).decode() == "user:hi\nassistant:It be"
    assert message["content"].startswith("Hello")
    assert chat(api, **body, echo=True)["choices"][0]["message"]["content"] == "It beHello, wörld 🌞!"
    assert texts(chunks(api, **body, echo=True)) == ["It beHello, wörld 🌞!"]


def test_the_engine_gets_what_was_asked_for(api):
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "max_tokens": 3, "min_tokens": 2, "seed": -1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "stop": "x", "stop_token_ids": [3], "ignore_eos": True, "logit_bias": {"65": -100},
        "bad_words": ["no"], "bad_words_token_ids": [[9, 8]], "skip_special_tokens": False, "priority": -4, "timeout_s": 9.5, "cache_salt": "salt", "user": "u", "metadata": {"a": 1},
    }  # fmt: skip
    chat(api, **body)
    (request,) = api.engine.generated
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.max_tokens, sampling.min_tokens) == (
        0.5,
        0.9,
        0,
        0.1,
        3,
        2,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos, sampling.logit_bias) == (("x",), (3,), True, {65: -100.0})
    assert sampling.bad_words_token_ids == ((9, 8), tuple(b"no"), tuple(b" no"))
    assert sampling.seed == 2**63 - 1
    assert (request.priority, request.timeout_s, request.cache_salt, request.arrival_time_s > 0) == (-4, 9.5, "salt", True)


def test_defaults_and_nulls_are_the_same(api):
    chat(api, temperature=None, top_p=None, n=None, stream=None, stop=None, tools=None, response_format=None, model=None)
    chat(api)
    first, second = api.engine.generated
    assert first.sampling == second.sampling
    assert first.sampling.max_tokens is None
    assert first.timeout_s == api.config.server.request_timeout


def test_gathered_chunks(api):
    parts = chunks(api, messages=HI, max_streaming_response_tokens=6, return_token_ids=True)
    sizes = [len(c["delta"].get("completion_token_ids", [])) for p in parts for c in p["choices"]][1:]
    assert all(size >= 6 for size in sizes[:-1])
    assert texts(parts) == ["Hello, wörld 🌞!"]


def test_the_sdk_streams(api):
    stream = api.sdk.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "Hello, wörld 🌞!"
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage.completion_tokens == 20


def test_best_of_returns_the_most_likely(api, monkeypatch):
    def logprobs(token: int, num_top: int) -> TopLogprobs:
        return TopLogprobs(-0.1 if token == ord("b") else -1.0, 1, [], [])

    monkeypatch.setattr("tests.frontend.fake_engine.fake_logprobs", logprobs)
    api.engine.script = lambda request: say(["aaa", "abbb", "bbbbbbbbaaaaaa"][request.index])(request)
    reply = chat(api, best_of=3)
    assert [(c["index"], c["message"]["content"], c["logprobs"]) for c in reply["choices"]] == [(0, "abbb", None)]
    assert [c["message"]["content"] for c in chat(api, best_of=3, n=2)["choices"]] == ["abbb", "bbbbbbbbaaaaaa"]
    assert len(chat(api, best_of=3, logprobs=True)["choices"][0]["logprobs"]["content"]) == 5
