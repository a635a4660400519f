"""SGLang's /generate: whole and streamed, one prompt and many."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.frontend.harness import EOS, say

ANSWER = "Hello, wörld 🌞!"
ANSWER_IDS = [*ANSWER.encode(), EOS]


@pytest.fixture(autouse=True)
def answer(api):
    api.engine.script = say(ANSWER)
    api.engine.generated.clear()


def generate(api, **body):
    reply = api.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(api, **body):
    reply = api.http.post("/generate", json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_one_text(api):
    reply = generate(api, text="hi", rid="mine")
    meta = reply["meta_info"]
    assert reply["text"] == ANSWER
    assert reply["output_ids"] == ANSWER_IDS
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 2,
        "completion_tokens": len(ANSWER_IDS),
        "cached_tokens": 1,
        "weight_version": "v1",
    }
    assert "index" not in reply


def test_ids_and_sampling_names(api):
    params = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "min_new_tokens": 2, "sampling_seed": 9, "stop": ["zz"], "no_stop_trim": True}
    reply = generate(api, input_ids=[104, 105], sampling_params=params)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    sent = api.engine.generated[0].sampling
    assert (sent.max_tokens, sent.temperature, sent.top_k, sent.min_tokens, sent.seed) == (3, 0.5, 4, 2, 9)
    assert sent.stop == ("zz",)
    assert sent.include_stop_str_in_output


def test_without_max_new_tokens_there_are_128(api):
    generate(api, text="hi")
    assert api.engine.generated[0].sampling.max_tokens == 128


def test_a_stop_string_is_cut_off(api):
    reply = generate(api, text="hi", sampling_params={"stop": "wör"})
    assert reply["text"] == "Hello, "
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wör"}


def test_a_batch_has_a_list_with_parameters_of_its_own(api):
    params = [{"max_new_tokens": 2, "n": 2, "sampling_seed": 5}, {"max_new_tokens": 3}]
    replies = generate(api, text=["one", "two"], sampling_params=params, rid="b")
    assert [reply["text"] for reply in replies] == ["He", "He", "Hel"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["b#0", "b#1", "b#2"]
    seeds = [request.sampling.seed for request in api.engine.generated]
    assert seeds[0] == 5
    assert seeds[1] != 5
    assert seeds[2] is None
    assert isinstance(generate(api, input_ids=[[104]]), list)
    assert isinstance(generate(api, text="hi", sampling_params={"n": 2}), list)


def test_log_probabilities(api):
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generate(api, text="hi", sampling_params={"max_new_tokens": 2}, **options)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 104, "h"], [-0.25, 105, "i"]]
    assert meta["output_token_logprobs"] == [[-0.25, 72, "H"], [-0.25, 101, "e"]]
    assert meta["output_top_logprobs"][0] == [[-0.25, 72, "H"], [-0.5, 73, "I"]]
    assert meta["input_top_logprobs"][0] is None
    meta = generate(api, text="hi", sampling_params={"max_new_tokens": 2}, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.25, 72, None], [-0.25, 101, None]]
    assert api.engine.generated[-1].sampling.prompt_logprobs is None


def test_no_new_tokens_at_all(api):
    reply = generate(api, text="hi", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (len(meta["input_token_logprobs"]), meta["output_token_logprobs"]) == (2, [])


def test_a_stream_holds_all_of_the_output_so_far(api):
    parts = events(api, text="hi")
    assert parts[-1]["text"] == ANSWER
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(parts))
    assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert parts[-1]["meta_info"]["completion_tokens"] == len(ANSWER_IDS)


def test_a_batch_streams_with_indices(api):
    parts = events(api, text=["a", "b"])
    last = {part["index"]: part["text"] for part in parts}
    assert last == {0: ANSWER, 1: ANSWER}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [999]}, "input_ids"),
        ({"input_ids": [1] * 5000}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 4}}, "sampling_params.min_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "sampling_params": {"regex": "["}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "rid": ["x"]}, "rid"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_field(api, body, field):
    reply = api.http.post("/generate", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)
