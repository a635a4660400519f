"""Structured output in the worker: whatever else runs, however the sequence came into the batch. Tokens are bytes here."""

from __future__ import annotations

import json
import re
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.outputs import INVALID_GRAMMAR
from fastengine.protocol.requests import GrammarSpec, ReasoningSpec, SamplingParams
from fastengine.protocol.steps import StepPlan
from fastengine.protocol.tokens import pack_token_ids, unpack_token_ids
from fastengine.text.grammar import GrammarCompiler, GrammarError
from fastengine.text.tokenizer import TokenizerError
from fastengine.worker.grammar import BackgroundCompiler, SlotGrammars
from fastengine.worker.model_host import ModelHost
from tests.frontend.harness import EOS as BYTE_EOS
from tests.frontend.harness import VOCAB_SIZE, ByteTokenizer
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import Driver, Request
from tests.worker.models import BLOCK_SIZE, NUM_BLOCKS, hf_config, write_model
from tests.worker.test_runner import chunk, started

PROMPT = [5, 6, 7, 8]
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


def grammar(kind: str, source: Any) -> GrammarSpec:
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source))


def params(kind: str, source: Any, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "grammar": grammar(kind, source), **more})


def text(request: Request) -> str:
    """The output up to the end-of-sequence token, which must be there."""
    assert request.error is None
    return bytes(request.output[: request.output.index(EOS)]).decode()


def test_many_grammars_between_plain_rows(llama: Driver) -> None:
    (reference,) = llama.run([Request(PROMPT, 40)])
    requests = [
        Request(PROMPT, 40),
        Request(PROMPT, 200, params("json_schema", SCHEMA)),
        Request([9, 10], 200, params("json_schema", SCHEMA, temperature=1.5), seed=1, arrival_step=3),
        Request(PROMPT, 12, params("choice", ["yes", "no"], presence_penalty=1.0)),
        Request(PROMPT, 30, params("regex", "[a-c]{4}-é?[0-9]{2}", temperature=2.0, top_k=5), seed=2, arrival_step=1),
        Request(PROMPT, 40),
    ]
    llama.run(requests, lambda: 3)
    assert requests[0].output == requests[-1].output == reference.output
    for request in requests[1:3]:
        value = json.loads(text(request))
        assert set(value) == {"n", "s"}
        assert 0 <= value["n"] <= 99
        assert len(value["s"]) <= 3
    assert text(requests[3]) in ("yes", "no")
    assert re.fullmatch("[a-c]{4}-é?[0-9]{2}", text(requests[4]))


def test_only_the_end_may_follow_a_whole_sentence(llama: Driver) -> None:
    """The steps that run ahead of the engine's seeing it yield the end again."""
    (request,) = llama.run([Request(PROMPT, 8, params("choice", ["abc"]))])
    assert request.output == [*b"abc", *[EOS] * 5]


def test_a_recomputed_sequence_goes_on_where_it_was(llama_host: ModelHost) -> None:
    spec = params("regex", "[a-c]{2}[x-z]{2}[0-9]{20}")
    llama_host.init_cache(NUM_BLOCKS, 0)
    (whole,) = driver_of(llama_host).run([Request(PROMPT, 25, spec)])
    for num_output in (0, 1, 3, 24, 25):
        llama_host.init_cache(NUM_BLOCKS, 0)
        known = PROMPT + whole.output[:num_output]
        sequence = started(3, known, [0, 1, 2, 3], num_prompt=len(PROMPT), sampling=spec)
        result = llama_host.step(chunk(0, 3, 0, len(known), started=[sequence]))
        assert unpack_token_ids(result.token_ids).tolist() == (whole.output[num_output : num_output + 1] or [EOS])


def test_a_slot_is_free_of_its_predecessors_grammar(llama_host: ModelHost) -> None:
    llama_host.init_cache(NUM_BLOCKS, 0)
    one_slot = Driver(llama_host.step, max_num_seqs=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    free, _, again, other = one_slot.run(
        [Request(PROMPT, 6), Request(PROMPT, 6, params("choice", ["yes"])), Request(PROMPT, 6, seed=1), Request(PROMPT, 3, params("choice", ["no"]))]
    )
    assert free.output == again.output, again.error
    assert text(other) == "no"


def test_logprobs_stay_those_of_the_raw_logits(llama: Driver) -> None:
    plain, bound = llama.run(
        [Request(PROMPT, 1, SamplingParams(temperature=0.0, logprobs=2)), Request(PROMPT, 1, params("choice", ["Z"], logprobs=2))]
    )
    assert bound.output == [ord("Z")]
    assert bound.logprobs[0].top_ids == plain.logprobs[0].top_ids
    assert bound.logprobs[0].logprob < plain.logprobs[0].logprob


def test_min_tokens_holds_the_end_back_while_the_grammar_leaves_a_choice(llama: Driver) -> None:
    wants_to_end = {EOS: 1000.0}
    free, held, finished = llama.run(
        [
            Request(PROMPT, 9, params("regex", "a+", logit_bias=wants_to_end)),
            Request(PROMPT, 9, params("regex", "a+", logit_bias=wants_to_end, min_tokens=5)),
            Request(PROMPT, 9, params("choice", ["ab"], min_tokens=5)),
        ]
    )
    assert text(free) == "a"
    assert text(held) == "aaaaa"
    assert text(finished) == "ab"


def test_stop_tokens_may_come_where_the_text_may_end(llama: Driver) -> None:
    bias = {ord("!"): 1000.0}
    early, late = llama.run(
        [
            Request(PROMPT, 3, params("regex", "a{2}", logit_bias=bias, stop_token_ids=(ord("!"),))),
            Request(PROMPT, 3, params("regex", "a{2}", logit_bias=bias)),
        ]
    )
    assert early.output == [*b"aa!"]
    assert late.output == [*b"aa", EOS]


def test_bad_words_give_way_when_nothing_else_fits(llama: Driver) -> None:
    words = tuple((token,) for token in b"a")
    either, only = llama.run(
        [
            Request(PROMPT, 2, params("choice", ["a", "b"], bad_words_token_ids=words)),
            Request(PROMPT, 2, params("choice", ["a"], bad_words_token_ids=words)),
        ]
    )
    assert text(either) == "b"
    assert text(only) == "a"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (grammar("regex", "("), "regex: "),
        (grammar("json_schema", "{"), "not JSON"),
        (grammar("xml", ""), "not a kind of grammar"),
    ],
)
def test_a_bad_grammar_fails_its_row_alone(llama: Driver, spec: GrammarSpec, words: str) -> None:
    (reference,) = llama.run([Request(PROMPT, 4)])
    good, bad, constrained = llama.run(
        [Request(PROMPT, 4), Request(PROMPT, 4, SamplingParams(grammar=spec)), Request(PROMPT, 4, params("choice", ["yes"]))]
    )
    assert good.output == reference.output
    assert text(constrained) == "yes"
    assert bad.output == []
    assert bad.error is not None
    assert bad.error.code == 400
    assert words in bad.error.message


def test_output_that_does_not_fit_fails_its_row_alone(llama_host: ModelHost) -> None:
    llama_host.init_cache(NUM_BLOCKS, 0)
    sequence = started(1, [*PROMPT, ord("x")], [1], num_prompt=len(PROMPT), sampling=params("choice", ["yes"]))
    columns = {"chunk_slots": [0, 1], "chunk_starts": [0, 0], "chunk_lengths": [2, 5]}
    plan = StepPlan(step_id=0, started=[started(0, [5, 6], [0]), sequence], **{name: pack_token_ids(values) for name, values in columns.items()})
    result = llama_host.step(plan)
    assert unpack_token_ids(result.slots).tolist() == [0]
    (error,) = result.errors
    assert (error.slot, error.code, error.reason) == (1, 400, INVALID_GRAMMAR)
    assert "does not fit the grammar" in error.message


def test_the_null_model_follows_no_grammar(tmp_path) -> None:
    host = loaded_host(write_model(tmp_path, hf_config(), {}), load_format="null")
    (request,) = driver_of(host).run([Request(PROMPT, 2, params("choice", ["yes"]))])
    assert request.error is not None
    assert request.error.code == 400
    assert "null model" in request.error.message


BEGIN, END = ord("<"), ord(">")


def test_a_grammar_holds_after_the_reasoning(llama: Driver) -> None:
    into = {BEGIN: 1000.0}  # greedy: begins its reasoning, and would begin again and again
    opened = params("choice", ["yes"], reasoning=ReasoningSpec(begin_token_id=BEGIN, end_token_id=END, max_tokens=3), logit_bias=into)
    inside = params("choice", ["yes"], reasoning=ReasoningSpec(end_token_id=END, starts_inside=True, max_tokens=2), logit_bias=into)
    ends = params("choice", ["yes"], reasoning=ReasoningSpec(end_token_id=END, starts_inside=True), logit_bias={END: 1000.0})
    skips = params("choice", ["yes"], reasoning=ReasoningSpec(begin_token_id=BEGIN, end_token_id=END), logit_bias={BEGIN: -100.0})
    budget_alone = SamplingParams(temperature=0.0, reasoning=ReasoningSpec(end_token_id=END, starts_inside=True, max_tokens=1), logit_bias=into)
    requests = llama.run([Request(PROMPT, 10, sampling) for sampling in (opened, inside, ends, skips, budget_alone)], lambda: 3)
    assert [text(request) for request in requests[:4]] == ["<<<<>yes", "<<>yes", ">yes", "yes"]
    assert requests[4].output == [BEGIN, END, *[BEGIN] * 8]


@pytest.mark.parametrize("num_output", range(9))
def test_reasoning_survives_recomputation(llama_host: ModelHost, num_output: int) -> None:
    sampling = params("choice", ["yes"], reasoning=ReasoningSpec(begin_token_id=BEGIN, end_token_id=END, max_tokens=3), logit_bias={BEGIN: 1000.0})
    llama_host.init_cache(NUM_BLOCKS, 0)
    known = [*PROMPT, *b"<<<<>yes"[:num_output]]
    result = llama_host.step(chunk(0, 2, 0, len(known), started=[started(2, known, [0, 1], num_prompt=len(PROMPT), sampling=sampling)]))
    assert unpack_token_ids(result.token_ids).tolist() == [[*b"<<<<>yes", EOS][num_output]]


def test_without_a_tokenizer_every_grammar_is_refused() -> None:
    def load() -> Any:
        raise TokenizerError("holds no tokenizer files")

    grammars = SlotGrammars(BackgroundCompiler(load, (EOS,)), 256)
    assert grammars.start(0, grammar("regex", "a"), None, [EOS], []) is None
    masks = grammars.masks([0])
    assert masks.errors == {0: "structured output needs the model's tokenizer: holds no tokenizer files"}


def test_ends_that_only_the_tokenizer_knows_never_come(llama_host: ModelHost) -> None:
    from fastengine.config import ModelConfig
    from fastengine.text.load import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(model=llama_host.config.model.model), llama_host.spec)
    grammars = SlotGrammars(BackgroundCompiler(lambda: tokenizer, (77,)), 256)
    grammars.start(0, grammar("choice", ["a"]), None, [77], [])
    assert np.flatnonzero(grammars.masks([0]).allowed[0]).tolist() == [ord("a")]
    assert grammars.advance(0, ord("a")) is None
    assert np.flatnonzero(grammars.masks([0]).allowed[0]).tolist() == [77]
    assert grammars.advance(0, 77) is None
    with pytest.raises(GrammarError, match="does not fit"):
        grammars._slots[0].advance(ord("b"))


def test_a_compiled_grammar_does_not_wait_for_one_that_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = BackgroundCompiler(ByteTokenizer, (BYTE_EOS,))
    told: SimpleQueue[str | None] = SimpleQueue()
    compiler.prepare(grammar("regex", "ab"), told.put)
    assert told.get(timeout=30) is None
    gate, check = threading.Event(), GrammarCompiler.check

    def slow_check(self: GrammarCompiler, spec: GrammarSpec) -> None:
        assert gate.wait(30)
        check(self, spec)

    monkeypatch.setattr(GrammarCompiler, "check", slow_check)
    compiler.prepare(grammar("regex", "cd"), told.put)
    grammars = SlotGrammars(compiler, VOCAB_SIZE)
    assert grammars.start(0, grammar("regex", "ab"), None, [BYTE_EOS], []) is None
    assert np.flatnonzero(grammars.masks([0]).allowed[0]).tolist() == [ord("a")]
    assert told.empty()
    gate.set()
    assert told.get(timeout=30) is None
