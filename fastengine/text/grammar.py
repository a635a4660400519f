"""Structured output: which tokens may come next under a JSON schema, a regex, a choice, a grammar or tags.

llguidance does the work. The API process compiles a grammar once to refuse a bad one (400 for that
request); a worker keeps one :class:`GrammarMatcher` per constrained sequence, which fills that row of
the batch's bitmask before sampling and is told what was sampled::

    bitmask  int32[rows, ceil(vocab_size / 32)]; token t of row r may come if bit t % 32 of [r, t // 32] is set
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import is_lark_syntax

from fastengine.protocol.requests import GrammarSpec
from fastengine.text.tokenizer import Tokenizer

# It travels with the request, beside its other sampling settings.
MAX_SOURCE_BYTES = 960 << 10
# GBNF is rewritten as Lark by Python, in a time that grows with the square of its rules: seconds for this much.
MAX_GBNF_BYTES = 64 << 10
# llguidance compiles by recursion, 2 to 10 KB a rule or definition that leads to the next: a source of MAX_SOURCE_BYTES can
# hold so many that an ordinary stack of 8 MiB is not enough, and the whole process ends. Pages are taken as they are touched.
COMPILE_STACK_BYTES = 1 << 30
MAX_CACHED_GRAMMARS = 64
# Unbounded white space between JSON tokens lets a weak model emit nothing else for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}

# A control character that no tokenizer joins with others.
MARK = b"\x02"
_stack_size_lock = threading.Lock()
_T = TypeVar("_T")


class GrammarError(ValueError):
    """A grammar can't be compiled, or can't go on; the message is for the one who sent it."""


class GrammarCompiler:
    """Compiled grammars for one vocabulary; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, max_remembered: int = MAX_CACHED_GRAMMARS):
        """Builds the vocabulary's trie (about 0.1 s). Raises GrammarError if tokens have no exact bytes."""
        if tokenizer.pieces is None:
            raise GrammarError("structured output needs a tokenizer whose tokens have exact bytes (byte-level or byte-fallback BPE)")
        self._tokenizer = tokenizer
        self._max_remembered = max_remembered
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._ll_tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_token_ids) or None)
        self._compiled: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_mask_words(self) -> int:
        """Length of a bitmask row in int32 words."""
        return -(-self._tokenizer.vocab_size // 32)

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether the grammar is compiled already, so that :meth:`check` takes no time."""
        with self._lock:
            return spec in self._compiled

    def check(self, spec: GrammarSpec) -> None:
        """Compile (and remember) a grammar. Raises GrammarError that says what is wrong with it."""
        self._prototype(spec)

    def matcher(self, spec: GrammarSpec, consumed: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the grammar's start, or after the output tokens ``consumed``. Raises GrammarError."""
        matcher = GrammarMatcher(self._prototype(spec).deep_copy(), frozenset(self._tokenizer.eos_token_ids), self.num_mask_words)
        for token_id in consumed:
            matcher.consume(token_id)
        return matcher

    def _prototype(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
                return found
        matcher = on_deep_stack(lambda: self._compile(spec))
        with self._lock:
            self._compiled[spec] = matcher
            if len(self._compiled) > self._max_remembered:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        grammar = to_llguidance(spec, self._tokenizer)
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{spec.kind}: {_message(matcher.get_error())}")
        self._check_first_token(spec, matcher.deep_copy())
        return matcher

    def _check_first_token(self, spec: GrammarSpec, matcher: llguidance.LLMatcher) -> None:
        """Raises GrammarError if no answer with any text in it can match."""
        eos = frozenset(self._tokenizer.eos_token_ids)
        row = np.zeros(self.num_mask_words, dtype=np.int32)
        GrammarMatcher(matcher, eos, self.num_mask_words).fill(row)
        octets = row.view(np.uint8)
        for token_id in eos:
            octets[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        if not row.any():
            raise GrammarError(f"{spec.kind}: no text matches it but the empty one")


class GrammarMatcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], num_mask_words: int):
        self.num_mask_words = num_mask_words
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def fill(self, row: np.ndarray) -> None:
        """Write the tokens that may come next into ``row``, a contiguous int32[num_mask_words]. Raises GrammarError."""
        if row.dtype != np.int32 or not row.flags["C_CONTIGUOUS"]:
            raise TypeError(f"a bitmask row must be contiguous int32, got {row.dtype}")
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def consume(self, token_id: int) -> None:
        """Take the sampled token. Raises GrammarError if the grammar does not allow it here."""
        if token_id in self._eos_token_ids and (self._matcher.is_stopped() or self._matcher.is_accepting()) and not self._matcher.is_error():
            return  # the sequence is over: there is nothing to go on from
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not fit the grammar: {_message(self._matcher.get_error())}")

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens consumed (speculation that was not accepted). Raises GrammarError."""
        if not self._matcher.rollback(num_tokens):
            raise GrammarError(f"can't take {num_tokens} tokens back: {_message(self._matcher.get_error())}")

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar: the sequence may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why it can't go on, if it can't (:func:`fill_bitmask` raises nothing)."""
        return _message(self._matcher.get_error()) if self._matcher.is_error() else None

    def _check(self) -> None:
        error = self.error
        if error is not None:
            raise GrammarError(error)


def fill_bitmask(rows: Sequence[tuple[GrammarMatcher, int]], bitmask: np.ndarray) -> None:
    """Fill the rows of ``bitmask`` (int32[batch, num_mask_words]) named beside each matcher, several at a time.

    Raises nothing for a matcher in error: look at its :attr:`GrammarMatcher.error`.
    """
    if bitmask.dtype != np.int32 or bitmask.ndim != 2 or not bitmask.flags["C_CONTIGUOUS"]:
        raise TypeError(f"the bitmask must be contiguous int32 of two dimensions, got {bitmask.dtype} of {bitmask.ndim}")
    batch, words = bitmask.shape
    _executor().unsafe_compute_mask_ptr([(matcher._matcher, row) for matcher, row in rows], bitmask.ctypes.data, words * 4, batch)


@functools.cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


def on_deep_stack(function: Callable[[], _T]) -> _T:
    """What ``function`` returns or raises in a thread with a stack of COMPILE_STACK_BYTES, which ends with it."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            result.set_exception(error)

    thread = threading.Thread(target=run, name="compile grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        assert tokenizer.pieces is not None
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = list(tokenizer.pieces.bytes_of)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer
        self._strips_space = tokenizer.pieces.strip_leading_space

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly ``text``: with them llguidance spells out what a grammar forces."""
        data = text.encode("utf-8") if isinstance(text, str) else bytes(text)
        # In front of a text the tokenizer may add a space; behind the mark it doesn't.
        mark = MARK if self._strips_space else b""
        ids = self._tokenizer.encode((mark + data).decode("utf-8", "replace"))
        while mark and ids and (mark.startswith(self.tokens[ids[0]]) or self.tokens[ids[0]] == b" "):
            mark = mark.removeprefix(self.tokens[ids.pop(0)])
        exact = b"".join([self.tokens[token_id] for token_id in ids]) == data
        return ids if exact else self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        """For text that the tokenizer normalizes: the longest token at each place, whatever its merges say."""
        ids: list[int] = []
        position = 0
        while position < len(data):
            lengths = range(min(self._longest, len(data) - position), 0, -1)
            token_id = next((self._by_bytes[data[position : position + n]] for n in lengths if data[position : position + n] in self._by_bytes), None)
            if token_id is None:
                break  # no token for this byte: what was found so far may be forced, the rest is left to the mask
            ids.append(token_id)
            position += len(self.tokens[token_id])
        return ids

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token_id for token_id, piece in enumerate(self.tokens) if piece and token_id not in special}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))


def _message(error: str) -> str:
    """The library's message without the dumps of its state and stack; a bare name of a state is explained."""
    text = error.split("\n<state>", 1)[0].split("\n<backtrace>", 1)[0][:1000]
    return "no text fits, as where a rule leads only to itself" if text.isidentifier() else text


def to_llguidance(spec: GrammarSpec, tokenizer: Tokenizer) -> str:
    """The grammar in llguidance's own form. Raises GrammarError on a source that is not of its kind."""
    num_bytes = len(spec.source) if spec.source.isascii() else len(spec.source.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_SOURCE_BYTES:
        raise GrammarError(f"{spec.kind}: {num_bytes} bytes long; {MAX_SOURCE_BYTES} are allowed")
    kinds: dict[str, Callable[[], str]] = {
        "json_schema": lambda: _json_schema(spec.source),
        "json_object": lambda: _json_schema('{"type": "object"}'),
        "regex": lambda: llguidance.LLMatcher.grammar_from_regex(spec.source),
        "choice": lambda: _choice(spec.source),
        "lark": lambda: _lark(spec.source, num_bytes),
        "structural_tag": lambda: _structural_tag(spec.source, tokenizer),
    }
    if spec.kind not in kinds:
        raise GrammarError(f"{spec.kind!r} is not a kind of grammar; {', '.join(kinds)} are")
    try:
        return kinds[spec.kind]()
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{spec.kind}: {error}") from error


def _json_schema(source: str) -> str:
    schema = _json(source, "json_schema")
    if not isinstance(schema, dict | bool):
        raise GrammarError("json_schema: must be a JSON object")
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)


def _lark(source: str, num_bytes: int) -> str:
    if num_bytes > MAX_GBNF_BYTES and not is_lark_syntax(source):
        raise GrammarError(f"lark: {num_bytes} bytes long; {MAX_GBNF_BYTES} are allowed of GBNF (what has no rule 'start:' is taken for it)")
    return llguidance.grammar_from("grammar", source)


def _choice(source: str) -> str:
    """One terminal: alternatives of a rule are parsed side by side, of which the library allows 2,000."""
    choices = _json(source, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("choice: must be a list of at least one text, none of them empty")
    return llguidance.LLMatcher.grammar_from_lark(
        "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def _structural_tag(source: str, tokenizer: Tokenizer) -> str:
    """``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``: free text with schemas inside tags."""
    value = _json(source, "structural_tag")
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise GrammarError("structural_tag: must be an object with the lists 'structures' and 'triggers', neither empty")
    tags = [_tag(index, structure, triggers) for index, structure in enumerate(structures)]
    used = {tag.trigger for tag in tags}
    special = {trigger for trigger in used if tokenizer.token_id(trigger) in tokenizer.special_ids}
    if special and special != used:
        raise GrammarError(f"structural_tag: triggers must be all special tokens or none; {sorted(special)} are, {sorted(used - special)} are not")
    return llguidance.StructTag.to_grammar(tags, assume_special=bool(special))


def _tag(index: int, structure: Any, triggers: Sequence[Any]) -> llguidance.StructTag:
    where = f"structural_tag: structures[{index}]"
    begin = structure.get("begin") if isinstance(structure, dict) else None
    end = structure.get("end") if isinstance(structure, dict) else None
    schema = structure.get("schema") if isinstance(structure, dict) else None
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise GrammarError(f"{where} must have the texts 'begin' and 'end' and the object 'schema'")
    trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
    if trigger is None:
        raise GrammarError(f"{where}: 'begin' starts with none of the triggers")
    return llguidance.StructTag(trigger=trigger, begin=begin, grammar={**schema, "x-guidance": JSON_OPTIONS}, end=end)


def _json(source: str, kind: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{kind}: is not JSON ({error})") from error
