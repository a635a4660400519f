"""Grammars in the worker: which tokens each constrained slot may sample next.

::

    prepare(grammar) --> a thread compiles (llguidance) and answers; steps go on
    start(slot)  --> takes the compiled grammar; one that is not there is compiled while the step's forward pass runs
    masks(slots) --> waits for such compilations, then one bitmask for the whole batch
    advance(slot, token) after sampling

Everything here is a function of the grammar and the slot's own tokens, so all ranks come to the same
masks, and a sequence that is recomputed goes on where it was. Most grammars compile in 1-8 ms, large ones in
half a second, and the first of a worker's life also waits for the tokenizer to be read: API processes have each
prepared before they send the first request that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fastengine.protocol.requests import GrammarSpec, ReasoningSpec
from fastengine.text.grammar import GrammarCompiler, GrammarError, GrammarMatcher, fill_bitmask
from fastengine.text.tokenizer import Tokenizer

# Those of all API processes together.
MAX_REMEMBERED = 1024


class BackgroundCompiler:
    """Reads the tokenizer at the first grammar and compiles in one thread of its own.

    ``eos_token_ids`` are those that end a sequence in the engine; ``foreign_end_ids`` those that only the
    tokenizer takes for one.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int]):
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1, "grammar")
        self.foreign_end_ids: list[int] = []

    def prepare(self, spec: GrammarSpec, done: Callable[[str | None], None]) -> None:
        """Compile ahead of the first :meth:`matcher`; ``done`` is called in the thread with what is wrong, or None."""

        def compile_it() -> None:
            try:
                self._ready_compiler().check(spec)
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                done(str(error) or type(error).__name__)
            else:
                done(None)

        self._thread.submit(compile_it)

    def matcher(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """A matcher at the grammar's start. The future's error is a GrammarError, or says why there is no tokenizer.

        It is there at once for a grammar that is compiled, whatever the thread is compiling.
        """
        compiler = self._compiler
        if compiler is None or not compiler.knows(spec):
            return self._thread.submit(lambda: self._ready_compiler().matcher(spec))
        ready: Future[GrammarMatcher] = Future()
        ready.set_result(compiler.matcher(spec))
        return ready

    def _ready_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            try:
                tokenizer = self._load_tokenizer()
                compiler = GrammarCompiler(tokenizer, max_remembered=MAX_REMEMBERED)
            except ValueError as error:
                raise GrammarError(f"structured output needs the model's tokenizer: {error}") from error
            if self._eos_token_ids:
                self.foreign_end_ids = sorted(set(tokenizer.eos_token_ids) - self._eos_token_ids)
            self._compiler = compiler
        return self._compiler


class ReasoningPhase:
    """Follows one sequence through its reasoning, which comes before what a grammar constrains.

    ``first`` is True until the first token: it may begin the reasoning. ``over_budget`` means that only
    the end marker may come.
    """

    def __init__(self, spec: ReasoningSpec):
        self._spec = spec
        self.begin_id = spec.begin_token_id
        self.end_id = spec.end_token_id
        self.inside = spec.starts_inside
        self.first = True
        self._num_tokens = 0

    @property
    def may_begin(self) -> bool:
        return self.first and not self.inside and self.begin_id is not None

    @property
    def over_budget(self) -> bool:
        return self.inside and self._spec.max_tokens is not None and self._num_tokens >= self._spec.max_tokens

    def advance(self, token_id: int) -> bool:
        """Take a sampled token; True if it belongs to the reasoning (its markers too) and is no business of the grammar."""
        first, self.first = self.first, False
        if self.inside:
            self._num_tokens += 1
            self.inside = token_id != self.end_id
            return True
        if first and token_id == self.begin_id:
            self.inside = True
            return True
        return False


@dataclass
class ConstrainedSlot:
    """A slot with a grammar, a reasoning phase, or both. ``pending`` are tokens sampled before the grammar was compiled."""

    end_ids: np.ndarray  # int64[e]: tokens that end the sequence: EOS and the request's stop tokens
    reasoning: ReasoningPhase | None
    compiling: Future[GrammarMatcher] | None
    pending: list[int]
    matcher: GrammarMatcher | None = None

    def compiled(self) -> GrammarMatcher | None:
        """The matcher at the sequence's present place, waiting for it if need be. Raises GrammarError."""
        if self.compiling is not None:
            self.matcher, self.compiling = self.compiling.result(), None
            pending, self.pending = self.pending, []
            for token_id in pending:
                self._consume(token_id)
        return self.matcher

    def advance(self, token_id: int) -> None:
        """Take a token of the output. Raises GrammarError if it does not fit."""
        if self.reasoning is not None and self.reasoning.advance(token_id):
            return
        if self.compiling is not None:
            self.pending.append(token_id)
        elif self.matcher is not None:
            self._consume(token_id)

    def _consume(self, token_id: int) -> None:
        assert self.matcher is not None
        # A step that ran ahead of the engine's seeing the end, or ignore_eos: there is nothing to go on from.
        if token_id in self.end_ids and self.matcher.is_accepting:
            return
        self.matcher.consume(token_id)


@dataclass
class Masks:
    """``allowed`` bool[R, vocab]: the tokens each row may sample; ``errors``: row -> why its sequence can't go on."""

    allowed: np.ndarray
    errors: dict[int, str]


class SlotGrammars:
    """The constrained slots of one persistent batch."""

    def __init__(self, compiler: BackgroundCompiler, vocab_size: int):
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._slots: dict[int, ConstrainedSlot] = {}

    def start(
        self, slot: int, grammar: GrammarSpec | None, reasoning: ReasoningSpec | None, end_ids: Sequence[int], output_ids: Sequence[int]
    ) -> str | None:
        """Take a sequence's constraints; ``output_ids`` is what it has sampled before (a recomputed one). Returns what is wrong."""
        state = ConstrainedSlot(
            end_ids=np.array(end_ids, dtype=np.int64),
            reasoning=None if reasoning is None else ReasoningPhase(reasoning),
            compiling=None if grammar is None else self._compiler.matcher(grammar),
            pending=[],
        )
        if reasoning is not None and not all(
            token_id is None or 0 <= token_id < self._vocab_size for token_id in (reasoning.begin_token_id, reasoning.end_token_id)
        ):
            return f"reasoning: token ids must be in [0, {self._vocab_size})"
        for token_id in output_ids:
            state.advance(token_id)
        self._slots[slot] = state
        return None

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def masks(self, slots: Sequence[int]) -> Masks:
        """What the given constrained slots may sample. Waits for grammars that are still being compiled."""
        allowed = np.ones((len(slots), self._vocab_size), dtype=bool)
        masks = Masks(allowed, {})
        matchers: list[tuple[GrammarMatcher, int]] = []
        for row, slot in enumerate(slots):
            state = self._slots[slot]
            if state.reasoning is not None and state.reasoning.inside:
                if state.reasoning.over_budget:
                    allowed[row] = False
                    allowed[row, state.reasoning.end_id] = True
                continue
            try:
                matcher = state.compiled()
            except GrammarError as error:
                masks.errors[row] = str(error)
                continue
            if matcher is not None:
                matchers.append((matcher, row))
        if matchers:
            self._fill(matchers, masks)
        for row, slot in enumerate(slots):
            if row not in masks.errors:
                self._allow_markers_and_ends(allowed[row], self._slots[slot])
                if not allowed[row].any():
                    masks.errors[row] = "the grammar can't go on: no token fits"
        return masks

    def _fill(self, matchers: list[tuple[GrammarMatcher, int]], masks: Masks) -> None:
        bitmask = np.zeros((len(matchers), matchers[0][0].num_mask_words), dtype=np.int32)
        fill_bitmask([(matcher, i) for i, (matcher, _) in enumerate(matchers)], bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little", count=min(self._vocab_size, bitmask.shape[1] * 32)).view(bool)
        for i, (matcher, row) in enumerate(matchers):
            masks.allowed[row, : bits.shape[1]] = bits[i]
            masks.allowed[row, bits.shape[1] :] = False
            masks.allowed[row, self._compiler.foreign_end_ids] = False
            if matcher.error is not None:
                masks.errors[row] = f"the grammar can't go on: {matcher.error}"

    def _allow_markers_and_ends(self, allowed: np.ndarray, state: ConstrainedSlot) -> None:
        if state.reasoning is not None and state.reasoning.may_begin:
            allowed[state.reasoning.begin_id] = True
        if state.matcher is not None and state.matcher.is_accepting and not (state.reasoning is not None and state.reasoning.inside):
            # A stop token is no part of the text: it may come wherever the text may end.
            allowed[state.end_ids] = True

    def advance(self, slot: int, token_id: int) -> str | None:
        """Take the token sampled for a slot; returns why its sequence can't go on, if it can't."""
        try:
            self._slots[slot].advance(token_id)
        except GrammarError as error:
            return str(error)
        return None
