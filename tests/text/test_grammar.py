"""Constrained random walks: whatever is sampled within the mask must match, and bad grammars are refused with a reason."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import GrammarSpec
from fastengine.text.grammar import GrammarCompiler, GrammarError, GrammarMatcher, _message, _Vocabulary, fill_bitmask
from fastengine.text.tokenizer import Tokenizer
from tests.frontend.harness import ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def spec(kind: str, source: Any) -> GrammarSpec:
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source))


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level)


def allowed_tokens(matcher: GrammarMatcher, row: np.ndarray) -> set[int]:
    matcher.fill(row)
    return {int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))}


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: GrammarSpec, seed: int, max_tokens: int = 300) -> str:
    """Sample uniformly within the mask until the end; prefer ending once it is allowed."""
    matcher = compiler.matcher(grammar)
    row = np.zeros(compiler.num_mask_words, np.int32)
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(max_tokens):
        allowed = allowed_tokens(matcher, row)
        assert allowed
        assert max(allowed) < tokenizer.vocab_size
        ends = allowed & set(tokenizer.eos_token_ids)
        assert bool(ends) == matcher.is_accepting
        token_id = ends.pop() if ends and generator.random() < 0.5 else int(generator.choice(sorted(allowed)))
        matcher.consume(token_id)
        if token_id in tokenizer.eos_token_ids:
            return tokenizer.decode(ids, skip_special_tokens=False)
        assert token_id not in tokenizer.special_ids
        assert tokenizer.token_bytes(token_id)
        ids.append(token_id)
    pytest.fail(f"no end after {max_tokens} tokens: {tokenizer.decode(ids)!r}")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixture", ["byte_level", "sentence_piece"])
def test_json_schema(fixture: str, seed: int, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(fixture)
    value = json.loads(walk(GrammarCompiler(tokenizer), tokenizer, spec("json_schema", SCHEMA), seed, 3000))
    assert list(value) == ["name", "age", "kind"]
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("a", "b")


def test_json_object(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    matcher = compiler.matcher(spec("json_object", ""))
    for token_id in byte_level.encode('{"a": [1, {"b": null}], "c": "naïve 😀"}'):
        matcher.consume(token_id)
    assert matcher.is_accepting
    with pytest.raises(GrammarError, match="does not fit"):
        compiler.matcher(spec("json_object", ""), byte_level.encode("[1]"))


@pytest.mark.parametrize("seed", range(5))
def test_regex(compiler: GrammarCompiler, byte_level: Tokenizer, seed: int) -> None:
    pattern = r"[a-c]{3}-[0-9]{2}(é|你)?"
    assert re.fullmatch(pattern, walk(compiler, byte_level, spec("regex", pattern), seed))


@pytest.mark.parametrize("seed", range(5))
def test_choice(compiler: GrammarCompiler, byte_level: Tokenizer, seed: int) -> None:
    choices = ["yes", "no", 'may"be\\', "ünï\n/你"]
    assert walk(compiler, byte_level, spec("choice", choices), seed) in choices


@pytest.mark.parametrize("source", ['start: "a" (B)+ "c"\nB: /[xy]/', 'root ::= "a" [xy]+ "c"'])
def test_lark_and_ebnf(compiler: GrammarCompiler, byte_level: Tokenizer, source: str) -> None:
    assert re.fullmatch("a[xy]+c", walk(compiler, byte_level, spec("lark", source), 1))


def structural(trigger: str, **changes: Any) -> dict[str, Any]:
    structure = {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>", **changes}
    return {"type": "structural_tag", "structures": [structure], "triggers": [trigger]}


def test_structural_tag(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = spec("structural_tag", structural("<function="))
    good = 'Let me see. <function=f>{"name": "x", "age": 7, "kind": "a"}</function> Done.'
    matcher = compiler.matcher(grammar, byte_level.encode(good))
    assert matcher.is_accepting
    compiler.matcher(grammar, byte_level.encode("free text with { and < in it"))
    for bad in ("<function=g>", '<function=f>{"age"', '<function=f>{"name": "x", "age": 100'):
        with pytest.raises(GrammarError, match="does not fit"):
            compiler.matcher(grammar, byte_level.encode(bad))


def test_structural_tag_with_a_special_token(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = spec("structural_tag", structural("<|im_start|>", begin="<|im_start|>", end=""))
    matcher = compiler.matcher(grammar, byte_level.encode('ok <|im_start|>{"name": "x", "age": 7, "kind": "b"}'))
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "json_schema: is not JSON"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", {"type": "no such type"}, "json_schema: "),
        ("json_schema", {"$ref": "https://example.com/schema.json"}, "json_schema: "),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 2}, "json_schema: "),
        ("regex", "(", "regex: "),
        ("regex", r"(?<=a)b", "regex: "),
        ("choice", [], "choice: must be a list"),
        ("choice", ["a", ""], "choice: must be a list"),
        ("choice", "yes", "choice: is not JSON"),
        ("lark", "start: undefined_rule", "lark: "),
        ("lark", "start: (", "lark: "),
        ("lark", "root ::= ", "lark: no text matches it"),
        ("regex", "", "regex: no text matches it"),
        ("structural_tag", {}, "structural_tag: must be an object"),
        ("structural_tag", structural("<other"), "starts with none of the triggers"),
        ("structural_tag", structural("<function=", end=None), "must have the texts"),
        ("xml", "", "'xml' is not a kind of grammar"),
        ("regex", "a" * ((1 << 20) + 1), "are allowed"),
    ],
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, kind: str, source: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        compiler.check(spec(kind, source))


def test_a_compiled_grammar_is_not_consumed(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    grammar = spec("regex", "[a-z]{4}")
    compiler.check(grammar)
    first = compiler.matcher(grammar, byte_level.encode("ab"))
    row, other = (np.zeros(compiler.num_mask_words, np.int32) for _ in range(2))
    start = allowed_tokens(compiler.matcher(grammar), other)
    assert allowed_tokens(first, row) != start
    first.rollback(len(byte_level.encode("ab")))
    assert allowed_tokens(first, row) == start


def test_a_batch_equals_single_rows(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    matchers = [
        compiler.matcher(spec("regex", "[0-9]+")),
        compiler.matcher(spec("json_schema", SCHEMA), byte_level.encode('{"name": "')),
        compiler.matcher(spec("choice", ["yes", "no"])),
    ]
    bitmask = np.full((5, compiler.num_mask_words), -1, np.int32)
    fill_bitmask([(matcher, row) for matcher, row in zip(matchers, (3, 0, 2), strict=True)], bitmask)
    for matcher, row in zip(matchers, (3, 0, 2), strict=True):
        single = np.zeros(compiler.num_mask_words, np.int32)
        matcher.fill(single)
        np.testing.assert_array_equal(bitmask[row], single)
    assert (bitmask[[1, 4]] == -1).all()
    for bad in (bitmask.astype(np.int64), bitmask[:, ::2], bitmask[0]):
        with pytest.raises(TypeError, match="contiguous int32"):
            fill_bitmask([], bad)
    with pytest.raises(TypeError, match="contiguous int32"):
        matchers[0].fill(bitmask[0].astype(np.int64))


def test_the_end(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    matcher = compiler.matcher(spec("choice", ["yes"]), byte_level.encode("yes"))
    row = np.zeros(compiler.num_mask_words, np.int32)
    assert allowed_tokens(matcher, row) == set(byte_level.eos_token_ids)
    assert matcher.is_accepting
    matcher.consume(byte_level.eos_token_ids[0])
    assert matcher.is_finished
    with pytest.raises(GrammarError, match="does not fit"):
        compiler.matcher(spec("choice", ["yes"]), [byte_level.eos_token_ids[0]])


def test_a_vocabulary_without_bytes_is_refused(word_piece: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="exact bytes"):
        GrammarCompiler(word_piece)


@pytest.mark.parametrize("text", ["{", '{"name": "', " a", "the fox", "é你", "e\u0301", ""])
def test_forced_text_is_spelled_exactly(exact_tokenizer: Tokenizer, text: str) -> None:
    vocabulary = _Vocabulary(exact_tokenizer)
    for data in (text, text.encode()):
        assert b"".join(vocabulary.tokens[token_id] for token_id in vocabulary(data)) == text.encode()
    assert b"".join(vocabulary.tokens[token_id] for token_id in vocabulary._longest_matches(text.encode())) == text.encode()


def test_thousands_of_choices_are_followed_to_the_end() -> None:
    compiler = GrammarCompiler(ByteTokenizer())
    matcher = compiler.matcher(GrammarSpec("choice", json.dumps([f"value{i}" for i in range(5000)])))
    for byte in b"value4321":
        matcher.consume(byte)
    assert matcher.is_accepting


@pytest.mark.parametrize(("kind", "source"), [("lark", "root ::= root"), ("lark", "start: start"), ("json_schema", '{"$ref": "#"}')])
def test_a_grammar_that_leads_only_to_itself_is_refused_in_words(kind: str, source: str) -> None:
    with pytest.raises(GrammarError, match="no text fits, as where a rule leads only to itself"):
        GrammarCompiler(ByteTokenizer()).check(GrammarSpec(kind, source))


@pytest.mark.parametrize("kind", ["rules", "terminals", "definitions"])
def test_a_long_way_from_rule_to_rule_ends_no_process(kind: str) -> None:
    """llguidance follows references by recursion: as many as a source can hold must neither overflow a stack nor harm who uses the result."""
    if kind == "definitions":
        chain = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3_000)}
        grammar = spec("json_schema", {"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"type": "null"}}})
    else:
        name = "R" if kind == "terminals" else "r"
        rules = [f"{name}{i}:{name}{i + 1}" for i in range(65_000)]
        grammar = spec("lark", f"start:{name}0\n" + "\n".join(rules) + f'\n{name}65000:"c" "d"')
    compiler = GrammarCompiler(ByteTokenizer())
    matcher = compiler.matcher(grammar)
    row = np.zeros((1, compiler.num_mask_words), np.int32)
    fill_bitmask([(matcher, 0)], row)
    matcher.consume(ord("{" if kind == "definitions" else "c"))


def test_a_panic_of_the_library_is_told_without_its_stack() -> None:
    assert _message("panic: assertion failed\n<backtrace>\n  0: core::panicking\n</backtrace>") == "panic: assertion failed"


def test_what_its_conversion_would_take_minutes_for_is_refused() -> None:
    source = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000)) + '\nr20000 ::= "c"'
    with pytest.raises(GrammarError, match="are allowed of GBNF"):
        GrammarCompiler(ByteTokenizer()).check(spec("lark", source))
